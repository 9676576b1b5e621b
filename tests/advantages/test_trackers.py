"""Trackers of prompts against a worked example."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages.trackers import (
    Tracker,
    retention,
    start_tracker,
    track,
    tracked_baseline,
    uncertainty,
)  # fmt: skip
from jaxrl_llm.errors import InputError
from jaxrl_llm.transform import RunFacts


def test_worked_example() -> None:
    v0 = (3 + 0.5) / (8 + 1)
    for divergence, kept, after in ((0.0, 0.96, 0.459293), (0.006, 0.933033, 0.461088), (0.06, 0.875, 0.465278)):
        k = retention(jnp.float32(divergence))
        np.testing.assert_allclose(k, kept, atol=1e-6)
        one = track(start_tracker(1, v0, 8.0), jnp.array([0]), jnp.array([1.0]), k[None])
        np.testing.assert_allclose(one.value, [after], atol=1e-6)
        np.testing.assert_allclose(one.memory, [8 * kept + 1], rtol=1e-6)
    weights = uncertainty(jnp.array([0.2, 0.5, 0.9, 0.388889]))
    np.testing.assert_allclose(weights / weights.sum(), [0.238411, 0.291391, 0.185431, 0.284767], atol=1e-6)


def test_unscored_rows_change_nothing_and_those_of_a_prompt_count_together() -> None:
    before = Tracker(jnp.array([0.5, 0.2, 0.8]), jnp.array([1.0, 4.0, 2.0]), jnp.zeros(3, bool))
    after = track(before, jnp.array([1, 0, 1, 1]), jnp.array([1.0, jnp.nan, 0.0, 1.0]), jnp.full(4, 0.5))
    np.testing.assert_allclose(after.value, [0.5, (0.4 + 2) / 5, 0.8], rtol=1e-6)
    np.testing.assert_allclose(after.memory, [1, 5, 2], rtol=1e-6)
    assert np.asarray(after.seen).tolist() == [False, True, False]


def test_bad_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="prompts"):
        tracked_baseline(prompts=0)
    with pytest.raises(InputError, match="most"):
        tracked_baseline(most=1.5)


def test_a_run_that_knows_its_prompts_gives_each_a_place() -> None:
    """Without it there are 4096 entries, so prompts 1 and 4097 share one; an explicit number overrides the run's."""
    told, given = RunFacts(prompts=5000), tracked_baseline(prompts=7)
    assert tracked_baseline().init().value.shape == tracked_baseline().init(RunFacts()).value.shape == (4096,)
    assert tracked_baseline().init(told).value.shape == (5000,)
    assert given.init(told).value.shape == given.init().value.shape == (7,)
