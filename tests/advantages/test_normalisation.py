"""Running moments equal the moments of all values so far."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.advantages.normalisation import (
    empty_moments,
    moments,
    normalised_values,
    running_reward_scaling,
    running_std,
    update_moments,
)
from jaxrl_llm.advantages.returns import generalised_advantages
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.utils.errors import InputError

random = np.random.default_rng(0)
N, L = 4, 5


def batch_of(reward: Any, values: Any = None) -> Trajectories:
    zeros, none, mask = (
        jnp.zeros((N, L), jnp.int32),
        jnp.zeros(N, jnp.int32),
        jnp.arange(L) < jnp.array([5, 3, 1, 4])[:, None],
    )
    V = None if values is None else jnp.asarray(values, jnp.float32)
    return Trajectories(zeros, mask, mask, zeros * 1.0, zeros, zeros, none, none, none > 0,
                        reward=jnp.asarray(reward, jnp.float32), values=V)  # fmt: skip


def test_moments_of_what_the_mask_has() -> None:
    x = np.array([1.0, np.nan, 3, 8])
    mean, variance = moments(jnp.asarray(x), jnp.asarray([True, False, True, True]))
    assert float(mean) == pytest.approx(4.0)
    assert float(variance) == pytest.approx(np.var([1, 3, 8], ddof=1))
    assert [float(v) for v in moments(jnp.asarray(x), jnp.zeros(4, bool))] == [0, 0]


def test_batches_one_after_the_other_are_as_one() -> None:
    batches = [random.normal(1000, 3, size=7) for _ in range(5)]
    masks = [random.random(7) < 0.7 for _ in range(3)] + [np.zeros(7, bool), np.ones(7, bool)]
    running = empty_moments()
    for x, mask in zip(batches, masks, strict=True):
        running = update_moments(running, jnp.asarray(np.where(mask, x, np.nan)), jnp.asarray(mask))
    every = np.concatenate([x[mask] for x, mask in zip(batches, masks, strict=True)])
    assert float(running.mean) == pytest.approx(every.mean(), rel=1e-6)
    assert float(running_std(running)) == pytest.approx(every.std(ddof=1), rel=1e-3)


def test_nothing_that_varies_divides_by_one() -> None:
    assert float(running_std(empty_moments())) == 1
    assert float(running_std(update_moments(empty_moments(), jnp.full(5, 0.3), jnp.ones(5, bool)))) == 1
    assert float(running_std(update_moments(empty_moments(), jnp.asarray([7.0]), jnp.ones(1, bool)))) == 1


@pytest.mark.parametrize(("shift", "clip"), [(False, None), (True, None), (False, 1.5)])
def test_rewards_are_scaled_by_all_so_far(shift: bool, clip: float | None) -> None:
    transform, seen = running_reward_scaling(shift, clip), []
    state = transform.init()
    for _ in range(3):
        reward = random.normal(2, 5, size=N)
        reward[1] = np.nan
        state, ready = transform.apply(state, batch_of(reward))
        seen += [r for r in reward if not np.isnan(r)]
        expected = (reward - (np.mean(seen) if shift else 0)) / np.std(seen, ddof=1)
        expected = expected if clip is None else np.clip(expected, -clip, clip)
        np.testing.assert_allclose(ready.reward, expected, rtol=1e-4, atol=1e-6)
    with pytest.raises(InputError, match="clip"):
        running_reward_scaling(clip=0.0)


def test_values_are_learnt_in_normal_units() -> None:
    """The first batch is in units of reward; the second in those of the first batch's returns."""
    inner = generalised_advantages(1.0, 0.9)
    transform = normalised_values(inner)
    V, reward = random.normal(size=(N, L)), 100 * random.normal(size=N)
    state, first = transform.apply(transform.init(), batch_of(reward, V))
    _, plain = inner.apply((), batch_of(reward, V))
    np.testing.assert_allclose(first.returns, plain.returns, rtol=1e-5, atol=1e-5)
    mask = np.asarray(first.action_mask)
    R = np.asarray(first.returns)[mask]
    _, second = transform.apply(state, batch_of(reward, V))
    _, scaled = inner.apply((), batch_of(reward, R.mean() + R.std() * V))
    np.testing.assert_allclose(second.advantages, scaled.advantages, rtol=1e-4, atol=1e-3)
    expected = (np.asarray(scaled.returns)[mask] - R.mean()) / R.std()
    np.testing.assert_allclose(np.asarray(second.returns)[mask], expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_array_equal(second.values, batch_of(reward, V).values)
    assert transform.needs == {"values"}
