"""Trackers of prompts against a worked example."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "algorithms"))

from batches import batch_of

from jaxrl_llm.advantages.trackers import (
    Tracker,
    offline_value,
    retention,
    start_tracker,
    track,
    tracked_baseline,
    uncertainty,
)  # fmt: skip
from jaxrl_llm.core.transform import RunFacts
from jaxrl_llm.utils.errors import InputError


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


def test_the_start_from_samples_before_the_run() -> None:
    """The card's example: 3 of 8 right give v = 0.388889 with the weight 8; a reward of 1 the advantage 0.611111."""
    v0 = float(offline_value(jnp.float32(3 / 8), 8))
    assert v0 == pytest.approx(0.388889, abs=1e-6)
    transform = tracked_baseline(prompts=4, offline=8)
    assert "start_value" in transform.needs
    info = {"start_value": jnp.array([3 / 8, jnp.nan, 0.0]), "drift": jnp.array([9.0, jnp.nan, jnp.nan])}
    batch: Any = batch_of(np.ones((3, 2)), [1.0, 1.0, jnp.nan], -np.ones((3, 2)), range(3), info=info)
    after, ready = transform.apply(transform.init(), batch)
    # A first visit: however far the policy has moved, it did not move since the last.
    np.testing.assert_allclose(after.value[:3], [0.459293, (0.96 * 0.5 + 1) / 1.96, 0.5], atol=1e-6)
    np.testing.assert_allclose(after.memory[:3], [8.68, 1.96, 1], rtol=1e-6)
    difference = (1 - v0) - 0.5
    np.testing.assert_allclose(ready.advantages[:, 0], np.array([1, -1, 0]) * np.sign(difference) * 0.7071, atol=1e-4)
    again, _ = transform.apply(after, batch)  # no second start
    np.testing.assert_allclose(again.memory[:2], [0.875 * 8.68 + 1, 0.875 * 1.96 + 1], rtol=1e-6)
    with pytest.raises(InputError, match="least"):
        tracked_baseline(least=1.0, offline=8)


def test_rows_that_are_only_measured_count_in_nothing() -> None:
    transform = tracked_baseline(prompts=4)
    action = np.ones((4, 2))
    whole: Any = batch_of(action, [1.0, 0.0, 1.0, 1.0], -action, [0, 1, 0, 1])
    whole = whole.with_info(measured=jnp.array([0.0, 0, 1, 1]), drift=jnp.zeros(4))
    alone: Any = batch_of(action[:2], [1.0, 0.0], -action[:2], [0, 1]).with_info(drift=jnp.zeros(2))
    (after, ready), (expected, one) = (transform.apply(transform.init(), x) for x in (whole, alone))
    for x, y in zip(after, expected, strict=True):
        np.testing.assert_array_equal(x, y)
    np.testing.assert_array_equal(ready.advantages[:2], one.advantages)
    np.testing.assert_array_equal(ready.weights, [[1, 1], [1, 1], [0, 0], [0, 0]])


def test_an_unknown_drift_of_a_prompt_that_was_seen_forgets_at_the_fastest() -> None:
    transform = tracked_baseline(prompts=2)
    before = Tracker(jnp.array([0.5, 0.5]), jnp.array([4.0, 4.0]), jnp.array([True, False]))
    batch: Any = batch_of(np.ones((2, 1)), [1.0, 1.0], -np.ones((2, 1)), range(2), info={"drift": jnp.full(2, jnp.nan)})
    after, _ = transform.apply(before, batch)
    np.testing.assert_allclose(after.memory, [0.875 * 4 + 1, 0.96 * 4 + 1], rtol=1e-6)
