"""Prompts drawn by the uncertainty of a tracker: the tracker of the credit, and its numbers before the run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "algorithms"))

from batches import batch_of
from choosing import rows_of
from fake_engine import Ran, begin

from jaxrl_llm.advantages.trackers import tracked_baseline
from jaxrl_llm.algorithms.score_function.spo_single_stream import tracker, with_start_value
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.scores import uncertain
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.rollouts.runtime.admission import Rule
from jaxrl_llm.utils.errors import InputError

RATES = [0.0, 0.25, 0.5, 1.0, 0.75, 0.5]


@pytest.mark.parametrize("column", [None, "rate"])
def test_it_is_the_tracker_of_the_credit(column: str | None) -> None:
    """After updates with several responses to a prompt, rows that are measured, and drifts that are not known."""
    random, rows = np.random.default_rng(0), rows_of(6, rate=RATES)
    curriculum = choose_prompts(uncertain(model=tracker(column=column)))(rows, 0)
    transform = tracked_baseline(prompts=6, offline=8 if column else 0)
    state, credit = curriculum.init(), transform.init()
    if column:
        np.testing.assert_allclose(state["rule0_value"], (8 * np.array(RATES) + 0.5) / 9, rtol=1e-6)
    for _ in range(5):
        prompt = random.integers(0, 6, 8)
        info = {"drift": random.choice([0.0, 0.01, 0.04, np.nan], 6)[prompt], "measured": np.arange(8) >= 6}
        info |= {"start_value": np.asarray(RATES)[prompt]}
        reward = random.choice([0.0, 1.0, np.nan], 8)
        numbers = {name: jnp.asarray(x, jnp.float32) for name, x in info.items()}
        batch: Any = batch_of(np.ones((8, 2)), reward, -np.ones((8, 2)), prompt, prompt_id=prompt, info=numbers)
        known = ~np.isnan(reward) & ~info["measured"] & np.asarray(credit.seen)[prompt] & ~np.isnan(info["drift"])
        credit, ready = transform.apply(credit, batch)
        state = curriculum.on_update(state, ready)
        seen = np.asarray(credit.seen)
        np.testing.assert_array_equal(state["rule0_seen"], seen)
        moved = info["drift"][known].mean() if known.any() else 0.0
        assert curriculum.metrics(state)["curriculum/drift"] == pytest.approx(moved, rel=1e-6)
        np.testing.assert_allclose(state["rule0_value"][seen], credit.value[seen], rtol=1e-5)
        np.testing.assert_allclose(state["rule0_memory"][seen], credit.memory[seen], rtol=1e-5)
    assert seen.sum() > 2


def test_the_weights_of_the_card() -> None:
    rows = rows_of(4)
    curriculum = choose_prompts(uncertain(model=tracker()))(rows, 0)
    state = {**curriculum.init(), "rule0_value": np.array([0.2, 0.5, 0.9, 0.388889], np.float32)}
    found = np.zeros(4)
    for draw in range(4000):
        (first,), _ = curriculum.select({**state, "draws": draw}, 1)
        found[first] += 1
    np.testing.assert_allclose(found / 4000, [0.238411, 0.291391, 0.185431, 0.284767], atol=0.025)


@pytest.mark.parametrize("wrong", [1.5, -0.1, "half", True])
def test_a_column_that_is_no_mean_reward(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"the column 'rate' of prompt 2 is .*, but must be a mean reward from 0 to 1"):
        choose_prompts(uncertain(model=tracker(column="rate")))(rows_of(2, rate=[0.5, wrong]), 0)


def test_episodes_know_what_their_prompt_earned_before_the_run() -> None:
    rollout = with_start_value(group(), "rate")
    assert (rollout.provides, rollout.columns) == (frozenset({"start_value"}), ("rate",))
    (found,) = Ran(begin([1], 2), Rule(), rollout, row={"rate": 0.25}).found.groups
    (plain,) = Ran(begin([1], 2), Rule(), group()).found.groups
    assert [one.info["start_value"] for one in found.episodes] == [0.25, 0.25]
    assert [one.tokens for one in found.episodes] == [one.tokens for one in plain.episodes]
