"""PARL: the reward model's whole gradient against the implicit function theorem, its limit, and the policy's part."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, finite_differences, gradient_of, outputs_of, prepared, random_batch
from method_step import arrays

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.online_preferences.parl import parl, responsive_shares
from jaxrl_llm.utils.errors import InputError

BETA, T = 0.5, 0.7
OLD = np.array([0.5, 0.25, 0.25])  # of three responses, in this order of preference from the worst
ROWS = np.array([0, 0, 1, 2])  # the samples of a group that has each as often as the policy


def softmax(theta: np.ndarray) -> np.ndarray:
    e = np.exp(theta - theta.max())
    return np.asarray(e / e.sum())


def lower(theta: np.ndarray, r: np.ndarray) -> float:
    p = softmax(theta)
    return float(p @ (r - T * (np.log(p) - np.log(OLD))))


def upper(theta: np.ndarray, r: np.ndarray) -> float:
    p = softmax(theta)
    return float(sum(2 * p[i] * p[j] * np.logaddexp(0, r[j] - r[i]) for i in range(3) for j in range(i)))


def lower_gradient(theta: np.ndarray, r: np.ndarray) -> np.ndarray:
    return finite_differences(lambda x: lower(x, r), theta, 1e-4)


def best(r: np.ndarray) -> np.ndarray:
    """The logits of the lower problem's optimum, by gradient ascent."""
    theta = np.log(OLD)
    for _ in range(300):
        theta = theta + 2.0 * lower_gradient(theta, r)
    return theta


def loss_of_rewards(r: Any) -> jax.Array:
    """The reward model's part of the loss of a group, whose implicit rewards are `r` of the three responses."""
    zero = np.zeros((4, 1))
    batch = batch_of(np.ones((4, 1)), ROWS.astype(float), zero, reference_logp=zero, info={"implicit_logp": zero})
    method = parl(BETA, T)
    ready = prepared(method, batch)
    outputs = outputs_of(zero).replace(extras={"implicit_logp": r[ROWS][:, None] / BETA})
    return method.objective(outputs, ready)[1]["reward_model"]


def test_the_reward_model_s_gradient_is_that_of_the_implicit_function_theorem() -> None:
    """A policy of three logits: the lower optimum by ascent, the Hessian by differences. A group of four samples has
    five pairs, and each of sixteen draws of two of them as often."""
    r = np.array([0.3, -0.2, 0.6])
    theta = best(r)
    assert np.abs(lower_gradient(theta, r)).max() < 1e-7
    hessian, mixed = (
        np.stack([(of(+1e-3 * one) - of(-1e-3 * one)) / 2e-3 for one in np.eye(3)], axis=1)
        for of in (lambda x: lower_gradient(theta + x, r), lambda x: lower_gradient(theta, r + x))
    )
    response = -np.linalg.pinv(hessian, rcond=1e-4) @ mixed  # a constant added to all logits changes nothing
    direct = finite_differences(lambda x: upper(theta, x), r)
    through_policy = finite_differences(lambda x: upper(x, r), theta) @ response
    scale = 16 / (2 * 5)
    value, found = jax.value_and_grad(loss_of_rewards)(jnp.asarray(r, jnp.float32))
    assert float(value) == pytest.approx(scale * upper(theta, r), rel=1e-5)
    np.testing.assert_allclose(found, scale * (direct + through_policy), rtol=2e-3, atol=2e-5)
    assert np.abs(through_policy).max() > 0.3 * np.abs(direct).max(), "the policy's part is not small"


def test_with_a_large_temperature_it_is_the_usual_loss_of_a_reward_model() -> None:
    batch, _ = random_batch(3, (4, 5, 2))
    x, r = arrays(batch), np.random.default_rng(0).normal(size=11)
    pairs = [(i, j) for i in range(11) for j in range(11) if x.group[i] == x.group[j] and x.reward[i] > x.reward[j]]

    def usual(r: np.ndarray) -> float:
        return float(np.mean([np.logaddexp(0, r[j] - r[i]) for i, j in pairs]))

    def found(r: jax.Array) -> jax.Array:
        return jnp.sum(responsive_shares(r, batch.scores, batch.group, 1e6))

    value, slope = jax.value_and_grad(found)(jnp.asarray(r, jnp.float32))
    assert float(value) == pytest.approx(usual(r), rel=1e-4)
    np.testing.assert_allclose(slope, finite_differences(usual, r), atol=1e-5)


def test_the_policy_learns_from_the_reward_model_alone() -> None:
    """Its gradient is that of GRPO, without scale, on the implicit rewards; the run's rewards only order the pairs."""
    batch, logp = random_batch(4)
    implicit = np.asarray(batch.reference_logp) + 0.5 * np.random.default_rng(1).normal(size=logp.shape)
    batch = batch.with_info(implicit_logp=jnp.asarray(implicit, jnp.float32))
    x = arrays(batch)
    r = 0.3 * ((implicit - x.reference) * x.mask).sum(1)
    plain = get("grpo", scale="none", average="token", kl_coefficient=0.0, clip_high=0.2)
    wanted = gradient_of(plain, batch.replace(reward=jnp.asarray(r, jnp.float32)), logp)
    extras = {"implicit_logp": implicit}
    np.testing.assert_allclose(gradient_of(parl(0.3), batch, logp, **extras), wanted, atol=1e-6)
    other = batch.replace(reward=1 - batch.reward)
    np.testing.assert_array_equal(prepared(parl(), batch).advantages, prepared(parl(), other).advantages)
    unscored = batch.replace(reward=batch.reward.at[1].set(jnp.nan))
    assert not np.asarray(prepared(parl(), unscored).advantages)[1].any()


def test_without_a_reward_model_it_is_refused() -> None:
    batch, logp = random_batch(4)
    ready = prepared(parl(), batch.with_info(implicit_logp=batch.reference_logp))
    with pytest.raises(InputError, match="of an implicit reward model needs"):
        parl().objective(outputs_of(logp), ready)
