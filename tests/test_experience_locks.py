"""experiments/experience/locks.py: what the policy is taught, and the order of the two sets."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from jaxrl_llm.rollouts.guidance.hints import BEGINNING, HINT

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def locks() -> Iterator[ModuleType]:
    """The module, which is imported from the root of the repository."""
    sys.path.insert(0, str(ROOT))
    try:
        from experiments.experience import locks

        yield locks
    finally:
        sys.path.remove(str(ROOT))


def test_a_lock_is_taught_to_guess_and_to_copy_but_not_its_keys(locks: ModuleType) -> None:
    task = locks.lock()
    assert not set(task.letters) & set(BEGINNING + HINT)  # so that these texts vanish, and the hint is left
    keys = {row["prompt"]: row["answer"] for row in task.rows}
    pairs = task.examples(np.random.default_rng(0), 400)
    plain = [(prompt, key) for prompt, key in pairs if prompt in keys]
    hinted = [(prompt, key) for prompt, key in pairs if prompt not in keys]
    assert len(plain) > 100
    assert len(hinted) > 100
    assert all(key.removesuffix(locks.END) in prompt for prompt, key in hinted)
    assert all(len(key.removesuffix(locks.END)) == task.length - 1 for _, key in pairs)
    assert sum(key.removesuffix(locks.END) == keys[prompt] for prompt, key in plain) <= 2  # one in 1,728 by chance


def test_the_second_set_comes_after_the_first_and_has_other_answers(locks: ModuleType) -> None:
    task = locks.one_after_the_other(first=2)
    sets = [{row["answer"] for row in task.rows if row["set"] == name} for name in "12"]
    assert not set("".join(sets[0])) & set("".join(sets[1]))
    curriculum = task.curriculum(task.rows, 0)
    ids, _ = curriculum.select(curriculum.init(), 4)
    assert {task.rows[i]["set"] for i in ids} == {"1"}
