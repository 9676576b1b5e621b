"""experiments/experience/reference_tasks.py: what is worth how much."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_one_letter_is_worth_one_and_the_traps_a_half(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    from experiments.experience import reference_tasks, rewards

    task = reference_tasks.traps(prompts=3, count=5)
    texts = list(reference_tasks.LETTERS)
    for row in task.rows:
        columns = {name: [row[name]] * len(texts) for name in ("answer", "traps")}
        found = getattr(rewards, task.reward)(texts, **columns)
        assert found == [task.judge(text, row) for text in texts]
        assert (found.count(1.0), found.count(0.5), len(found)) == (1, 5, 36)
        assert found[texts.index(row["answer"])] == 1.0
        assert task.judge("", row) == 0.0
