"""The shaped probability of guided tokens."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.guidance.ampo_multi_guidance import scaled_sum
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.objectives import clip, unclipped
from jaxrl_llm.objectives.surrogates import guided, guided_rows, guided_tokens, shaped_probability
from jaxrl_llm.utils.errors import InputError

N, L = 3, 2
MASK = jnp.array([[True, True], [True, True], [True, False]])


def batch_of(**info: jax.Array) -> Trajectories:
    zeros, group = jnp.zeros((N, L), jnp.int32), jnp.zeros(N, jnp.int32)
    return Trajectories(
        tokens=zeros,
        token_mask=MASK,
        action_mask=MASK,
        behaviour_logp=-1.0 * MASK,
        policy_step=zeros,
        turn=zeros,
        group=group,
        prompt_id=group,
        truncated=jnp.zeros(N, bool),
        advantages=jnp.array([[1.0, -2], [0.5, 1], [3, 0]]),
        info=info or None,
    )


def test_values_and_gradients() -> None:
    logp = jnp.log(jnp.array([0.05, 0.5, 0.9]))
    np.testing.assert_allclose(shaped_probability(logp), [0.333333, 0.833333, 0.9], atol=1e-6)
    slope = jax.vmap(jax.grad(shaped_probability))
    np.testing.assert_allclose(slope(logp), [0.222222, 0.138889, 0.09], atol=1e-6)
    assert np.isfinite(slope(jnp.array([-1e4, 0.0, 1e4]))).all()


def test_marks_by_row_or_token_or_none() -> None:
    assert not guided_tokens(batch_of()).any()
    assert guided_tokens(batch_of(guided=jnp.array([True, False, True]))).sum() == 3
    by_token = batch_of(guided=jnp.array([[False, True], [False, False], [False, True]]))
    assert guided_rows(by_token).tolist() == [True, False, False]


def test_only_guided_tokens_are_shaped() -> None:
    batch = batch_of(guided=jnp.array([[False, True], [False, False], [True, True]]))
    logp = jnp.array([[-0.3, -1e4], [-2.0, -0.7], [-0.1, jnp.nan]])
    ratio = jnp.exp(jnp.clip(jnp.where(MASK, logp + 1, 0.0), -20, 20))
    value, statistics = guided(clip(0.2, 0.2))(ratio, PolicyOutputs(logp, jnp.zeros((N, L))), batch)
    own, _ = clip(0.2, 0.2)(ratio, PolicyOutputs(logp, jnp.zeros((N, L))), batch)
    taught = batch.advantages * shaped_probability(jnp.where(MASK, logp, 0.0))
    here = guided_tokens(batch)
    np.testing.assert_allclose(value, jnp.where(here, taught, own), atol=1e-6)
    assert statistics["guided/share"].sum() == 2
    assert (np.asarray(statistics["clip/low"])[np.asarray(here)] == 0).all()
    with pytest.raises(InputError, match="constant"):
        guided(unclipped(), constant=0.0)


def test_a_sum_over_the_batch() -> None:
    assert float(scaled_sum(4)(jnp.ones((N, L)), batch_of())) == 1.25
