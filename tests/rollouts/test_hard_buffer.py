"""The buffer of hard problems: what it admits, draws, drops and keeps in a checkpoint."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.curriculum.compose import hard_buffer, solved_by
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs
from jaxrl_llm.utils.errors import InputError

ROWS = [{"prompt": str(i)} for i in range(40)]


def step_of(ids: Any, reward: Any, part: Any = None) -> Any:
    """What a curriculum reads of a step: two samples of each prompt with this mean reward."""
    ids, reward = np.repeat(ids, 2), np.repeat(np.asarray(reward, float), 2)
    batch = SimpleNamespace(
        prompt_id=ids, need=lambda name: reward, info=None if part is None else {"part": np.repeat(part, 2)}
    )
    return SimpleNamespace(scored=SimpleNamespace(batch=batch))


def test_second_prompts_do_not_count() -> None:
    assert solved_by(step_of([3, 5, 3], [0.5, np.nan, 1.0], [0, 0, 1])) == {3: 0.5}
    assert solved_by(step_of([3, 5, 3], [0.0, 1.0, 1.0])) == {3: 0.5, 5: 1.0}


@given(st.integers(0, 1000), st.integers(1, 9), st.integers(1, 12), st.booleans())
@settings(max_examples=20, deadline=None, derandomize=True, database=None)
def test_it_is_a_first_in_first_out_buffer(seed: int, count: int, most: int, resume: bool) -> None:
    random = np.random.default_rng(seed)
    curriculum = hard_buffer(0.5, 0.5, most)(ROWS, seed)
    state, kept = curriculum.init(), list[int]()
    for _ in range(6):
        before = json.dumps(state)
        ids, after = curriculum.select(state, count)
        assert json.dumps(state) == before, "a state is not changed"
        assert len(ids) == count
        assert curriculum.select(json.loads(before), count)[0].tolist() == ids.tolist(), "a restart draws the same"
        old = ids[count - after["replayed"] :].tolist()
        assert len(set(old)) == len(old) <= min(round(count / 3), len(kept))
        assert set(old) <= set(kept), "it draws what is in the buffer"
        rates = {int(i): float(random.integers(3)) / 2 for i in ids}
        step = step_of(list(rates), list(rates.values()))
        kept = [i for i in kept if rates.get(i, 0.0) < 0.5]
        kept = [*kept, *(i for i, rate in rates.items() if rate < 0.5 and i not in kept)][-most:]
        state = curriculum.observe(json.loads(json.dumps(after)) if resume else after, step)
        assert state["buffer"] == kept
        assert curriculum.metrics(state)["curriculum/buffer"] == len(kept) <= most
    assert curriculum.select(state, 0)[1]["drawn"] == state["drawn"]


def test_without_a_share_or_hard_problems_it_is_the_stream() -> None:
    plain = shuffled_epochs(ROWS, 3)
    for curriculum, rate in ((hard_buffer(0.0)(ROWS, 3), 0.0), (hard_buffer()(ROWS, 3), 1.0)):
        state, other = curriculum.init(), plain.init()
        for _ in range(4):
            ids, state = curriculum.select(state, 7)
            expected, other = plain.select(other, 7)
            np.testing.assert_array_equal(ids, expected)
            state = curriculum.observe(state, step_of(ids, np.full(7, rate)))


def test_it_is_drawn_from_every_so_many_times_and_by_another_score() -> None:
    curriculum = hard_buffer(1.0, 0.5, every=3, score=lambda batch: 1.0 - batch.need("reward"))(ROWS, 0)
    state, replayed = curriculum.init(), []
    for _ in range(7):
        ids, state = curriculum.select(state, 4)
        replayed.append(state["replayed"])
        state = curriculum.observe(state, step_of(ids, np.ones(4)))  # their score is 0
    assert replayed == [0, 0, 2, 0, 0, 2, 0]
    ids, state = curriculum.select(curriculum.init(), 4)
    assert curriculum.observe(state, step_of(ids, np.zeros(4)))["buffer"] == []


def test_a_wrong_setting_is_named() -> None:
    with pytest.raises(InputError, match="share of hard_buffer is -1, but must be at least 0"):
        hard_buffer(-1)
