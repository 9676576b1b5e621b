"""The clipped surrogate against numpy, and its gradient against finite differences in double precision."""

from __future__ import annotations

from dataclasses import MISSING
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jaxrl_llm import objectives
from jaxrl_llm.algorithms.policy_loss.remix import centred_clip
from jaxrl_llm.algorithms.score_function.rec_off_policy_reinforce import masked_score
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.objectives import clip, geometric_clip, gradient_preserving_clip
from jaxrl_llm.objectives.covariance import clip_and_detach
from jaxrl_llm.objectives.functional import clipped_value
from jaxrl_llm.utils.errors import InputError

LOGP = np.array([[-0.9, -0.8, -1.5], [-0.6, -1.6, 0], [-0.25, 0, 0], [-1.2, -0.15, -1.4]])
OLD = np.array([[-1, -0.5, -2], [-0.7, -1.2, 0], [-0.3, 0, 0], [-1.5, -0.1, -0.9]])
ADVANTAGES = 0.866024 * np.array([1, -1, -1, 1])[:, None] * np.ones((4, 3))


def applied(surrogate: Any, ratio: jax.Array, advantages: jax.Array) -> Any:
    """A surrogate applied to ratios and advantages only."""
    zeros = jnp.zeros(ratio.shape)
    fields = {name: zeros for name, field in Trajectories.__dataclass_fields__.items() if field.default is MISSING}
    return surrogate(ratio, PolicyOutputs(zeros, zeros), Trajectories(**fields, advantages=advantages))


def by_loop(ratio: np.ndarray, advantages: np.ndarray, low: float, high: float) -> np.ndarray:
    out = np.zeros(ratio.shape)
    for at in np.ndindex(ratio.shape):
        bounded = max(1 - low, min(1 + high, ratio[at]))
        out[at] = min(ratio[at] * advantages[at], bounded * advantages[at])
    return out


def test_token_losses_of_four_samples_by_hand() -> None:
    found = -clipped_value(jnp.exp(jnp.asarray(LOGP - OLD)), jnp.asarray(ADVANTAGES), 0.2, 0.2)
    expected = [
        [-0.957104, -0.641566, -1.039229],
        [0.957104, 0.692819, 0.866024],
        [0.910426, 0.866024, 0.866024],
        [-1.039229, -0.823787, -0.525270],
    ]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1.5e-6)


RATIOS = st.floats(0.01, 5)
ADVANTAGE = st.floats(-3, 3)
BOUNDS = st.sampled_from([(0.2, 0.2), (0.2, 0.28), (0.0, 0.0), (1.0, 3.0), (3e-4, 4e-4)])


@settings(max_examples=100, deadline=None, derandomize=True)
@given(ratio=RATIOS, advantage=ADVANTAGE, bounds=BOUNDS)
def test_value_and_statistics_are_those_of_a_loop(ratio: float, advantage: float, bounds: tuple[float, float]) -> None:
    low, high = bounds
    assume(abs(ratio - (1 - low)) > 1e-6)
    assume(abs(ratio - (1 + high)) > 1e-6)
    assume(advantage == 0 or abs(advantage) > 1e-30)  # less is subnormal, and 0 on most devices
    value, statistics = applied(clip(low, high), jnp.full((1, 1), ratio), jnp.full((1, 1), advantage))
    expected = by_loop(np.full((1, 1), ratio), np.full((1, 1), advantage), low, high)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    assert bool(statistics["clip/low"][0, 0]) == (ratio < 1 - low and np.float32(advantage) < 0)
    assert bool(statistics["clip/high"][0, 0]) == (ratio > 1 + high and np.float32(advantage) > 0)


@pytest.mark.parametrize("seed", [0, 1])
def test_gradient_by_finite_differences(seed: int) -> None:
    random = np.random.default_rng(seed)
    difference, advantages = random.normal(size=(4, 5)) * 0.5, random.normal(size=(4, 5))
    low, high, step = 0.2, 0.28, 1e-6
    edges = np.abs(np.exp(difference)[..., None] - [1 - low, 1 + high]).min(axis=-1)
    assert (edges > 1e-4).all(), "no kink within the finite step"
    up = by_loop(np.exp(difference + step), advantages, low, high)
    down = by_loop(np.exp(difference - step), advantages, low, high)

    def total(difference: jax.Array) -> jax.Array:
        return jnp.sum(applied(clip(low, high), jnp.exp(difference), jnp.asarray(advantages, jnp.float32))[0])

    found = jax.grad(total)(jnp.asarray(difference, jnp.float32))
    np.testing.assert_allclose(found, (up - down) / (2 * step), rtol=1e-4, atol=1e-6)
    cut = np.asarray(found) == 0
    _, statistics = applied(clip(low, high), jnp.exp(jnp.asarray(difference)), jnp.asarray(advantages))
    assert 0 < cut.sum() < cut.size
    assert (cut == (statistics["clip/low"] + statistics["clip/high"] > 0)).all(), (
        "the statistics count the cut gradients"
    )


def test_at_ratio_one_the_gradient_is_the_advantage() -> None:
    advantages = jnp.array([2.0, -3.0, 0.0])
    found = jax.grad(lambda ratio: jnp.sum(applied(clip(0.2, 0.2), ratio, advantages)[0]))(jnp.ones(3))
    assert found.tolist() == [2, -3, 0]


def test_a_huge_ratio_with_a_bad_advantage_is_finite() -> None:
    value, _ = applied(clip(), jnp.exp(jnp.array([20.0, 20.0])), jnp.array([-1.0, 1.0]))
    np.testing.assert_allclose(value, [-np.exp(20.0), 1.2], rtol=1e-6)


@pytest.mark.parametrize(
    ("low", "high"), [(-0.1, 0.2), (1.1, 0.2), (0.2, -0.1), (float("nan"), 0.2), (0.2, float("nan"))]
)
def test_a_range_that_makes_no_sense_is_refused(low: float, high: float) -> None:
    with pytest.raises(InputError, match=r"(low|high) of clip is"):
        clip(low, high)


@pytest.mark.parametrize(
    "make", [clip, geometric_clip, gradient_preserving_clip, objectives.clipped, objectives.within]
)
def test_one_bound_is_both(make: Any) -> None:
    """A clip of one number is symmetric; with two it has these."""
    ratio, A = jnp.exp(jnp.asarray(LOGP - OLD)), jnp.asarray(ADVANTAGES)

    def values(*bounds: float) -> Any:
        made = make(*bounds)
        surrogate = made if make not in (objectives.clipped, objectives.within) else objectives.log_probability(made)
        return jax.tree.leaves(applied(surrogate, ratio, A))

    np.testing.assert_array_equal(values(0.1), values(0.1, 0.1))
    assert any((x != y).any() for x, y in zip(values(0.1), values(0.1, 0.9), strict=True))


def test_other_pairs_of_bounds_are_symmetric_too() -> None:
    ratio, A = jnp.exp(jnp.asarray(LOGP - OLD)), jnp.asarray(ADVANTAGES)
    batch = Trajectories(
        **{n: jnp.zeros(ratio.shape) for n, f in Trajectories.__dataclass_fields__.items() if f.default is MISSING},
        advantages=A,
    ).replace(action_mask=jnp.ones(ratio.shape, bool), info={"detached": jnp.zeros(ratio.shape, bool)})
    batch = batch.replace(old_logp=jnp.zeros(ratio.shape))
    outputs = PolicyOutputs(jnp.log(ratio), jnp.zeros(ratio.shape))
    for one, two in (
        (centred_clip(0.1), centred_clip(0.1, 0.1)),
        (clip_and_detach(0.1), clip_and_detach(0.1, 0.1)),
    ):
        np.testing.assert_array_equal(one(ratio, outputs, batch)[0], two(ratio, outputs, batch)[0])
    for one, two in (
        (objectives.within_divergence(0.1), objectives.within_divergence(0.1, 0.1)),
        (masked_score("two-side", clip_low=0.1), masked_score("two-side", clip_low=0.1, clip_high=0.1)),
    ):
        np.testing.assert_array_equal(one(ratio, batch), two(ratio, batch))
