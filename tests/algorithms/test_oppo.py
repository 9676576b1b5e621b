"""OPPO over codes: the card's triplet, the losses and the goal against a loop, and what a latent comes to mean."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, finite_differences, outputs_of, prepared
from method_step import learn

from jaxrl_llm.algorithms.preferences.oppo import oppo, triplet
from jaxrl_llm.core.trajectory import PolicyOutputs
from jaxrl_llm.utils.errors import InputError

K, L = 3, 4
REWARD = np.tile(np.repeat([1.0, 0.0], K), 2)
CODE = np.tile(np.arange(K, dtype=float), 4)


def random_case(seed: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """Two pairs of responses behind each of three codes, log-probabilities, and values of a head."""
    random = np.random.default_rng(seed)
    mask = np.repeat(np.arange(L) < random.integers(2, L + 1, 4)[:, None], K, axis=0)
    logp, values = -random.gamma(2.0, 0.5, mask.shape) * mask, random.normal(size=mask.shape)
    batch = batch_of(mask, REWARD, logp, np.repeat([3, 8], 2 * K), values=values, info={"code": CODE})
    return batch, logp, values


def softmax(e: np.ndarray) -> np.ndarray:
    return np.asarray(np.exp(e - e.max()) / np.exp(e - e.max()).sum())


def of_responses(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """f64[4, K]: z of each response, in the order of the rows."""
    e = np.array([row[np.flatnonzero(own).max()] for row, own in zip(values, mask, strict=True)])
    return np.stack([softmax(e[i : i + K]) for i in range(0, len(e), K)])


def pull(goal: np.ndarray, z: np.ndarray, margin: float) -> float:
    """The mean over both pairs, whose responses are the rows 0 and 1, and 2 and 3."""
    away = [np.linalg.norm(goal - z[i]) - np.linalg.norm(goal - z[i + 1]) + margin for i in (0, 2)]
    return float(np.mean(np.maximum(away, 0)))


def test_it_is_the_loop() -> None:
    batch, logp, values = random_case(0)
    mask, goal = np.asarray(batch.action_mask), np.array([0.2, 0.5, 0.3])
    method = oppo(K, preference_weight=2.0, margin=0.6, rate=0.3)

    def loss(logp: np.ndarray, values: np.ndarray) -> float:
        z = of_responses(values, mask)
        means = ((logp * mask).sum(1) / mask.sum(1)).reshape(4, K)
        return float(np.mean(-(z * means).sum(1)) + 2.0 * pull(goal, z, 0.6))

    start = jnp.asarray(goal, jnp.float32)
    found = learn(method, batch, logp, state=start, values=jnp.asarray(values, jnp.float32))
    assert found.loss == pytest.approx(loss(logp, values), rel=1e-5)
    np.testing.assert_allclose(found.gradient, finite_differences(lambda x: loss(x, values), logp), atol=1e-5)

    def by_values(values: jax.Array) -> jax.Array:
        outputs: PolicyOutputs = outputs_of(logp).replace(extras={"values": values})
        return method.objective(outputs, prepared(method, batch, start))[0]

    slope = jax.grad(by_values)(jnp.asarray(values, jnp.float32))
    np.testing.assert_allclose(slope, finite_differences(lambda x: loss(logp, x), values), atol=1e-5)
    z = of_responses(values, mask)
    moved = np.maximum(goal - 0.3 * finite_differences(lambda x: pull(x, z, 0.6), goal), 0)
    np.testing.assert_allclose(found.state, moved / moved.sum(), atol=1e-6)
    nearer = [np.linalg.norm(goal - z[i]) < np.linalg.norm(goal - z[i + 1]) for i in (0, 2)]
    assert found.metrics["latent/accuracy"] == pytest.approx(np.mean(nearer))
    np.testing.assert_allclose([found.metrics[f"goal/{k}"] for k in range(K)], goal, atol=1e-6)


def test_the_triplet_of_the_worked_example() -> None:
    one, plus, minus = (jnp.array(x) for x in ([1.0, 0.0], [0.5, 0.0], [0.0, 0.5]))
    assert float(triplet(one, plus, minus)) == pytest.approx(0.381966, abs=1e-6)
    assert float(triplet(one, one, minus)) == 0
    np.testing.assert_array_equal(jax.grad(triplet, argnums=1)(one, one, one), 0)


def test_codes_come_to_stand_for_responses_and_the_goal_for_the_preferred_ones() -> None:
    """A tabular policy and encoder of two kinds of responses, the second of which is preferred: the policy behind the
    goal's code writes it, and behind another code the other."""
    method, codes = oppo(2), np.tile([0.0, 1.0], 2)
    batch = batch_of(np.ones((4, 1)), np.repeat([1.0, 0.0], 2), -np.ones((4, 1)), info={"code": codes})

    def outputs(params: Any) -> PolicyOutputs:
        logp = jax.nn.log_softmax(params["policy"], axis=1)  # [code, kind]
        rows = jnp.stack([logp[0, 1], logp[1, 1], logp[0, 0], logp[1, 0]])
        return outputs_of(rows[:, None]).replace(extras={"values": params["encoder"][:, None]})

    @jax.jit
    def step(params: Any, goal: Any) -> Any:
        goal, ready = method.transform.apply(goal, batch.replace(values=params["encoder"][:, None]))
        slopes = jax.grad(lambda params: method.objective(outputs(params), ready)[0])(params)
        return jax.tree.map(lambda x, slope: x - 0.3 * slope, params, slopes), goal

    params: Any = {"policy": jnp.zeros((2, 2)), "encoder": jnp.zeros(4)}
    goal = method.transform.init()
    for _ in range(200):
        params, goal = step(params, goal)
    used = int(np.argmax(goal))
    shares = np.asarray(jax.nn.softmax(params["policy"], axis=1))
    assert shares[used, 1] > 0.9 > 0.1 > shares[1 - used, 1]


def test_rows_without_pairs_and_outputs_without_values() -> None:
    batch, logp, values = random_case(1)
    method, extras = oppo(K), {"values": jnp.asarray(values, jnp.float32)}
    unscored = batch.replace(reward=batch.reward.at[: 2 * K].set(jnp.nan))
    alone = jax.tree.map(lambda x: x[2 * K :], batch)
    one = learn(method, unscored, logp, **extras)
    other = learn(method, alone, logp[2 * K :], values=extras["values"][2 * K :])
    assert one.loss == pytest.approx(other.loss, rel=1e-6)
    assert not one.gradient[: 2 * K].any()
    np.testing.assert_allclose(one.state, other.state, atol=1e-7)
    nothing = learn(method, batch.replace(reward=jnp.full(4 * K, jnp.nan)), logp, **extras)
    assert nothing.loss == 0
    np.testing.assert_allclose(nothing.state, [2 / 3, 1 / 6, 1 / 6], rtol=1e-6)
    with pytest.raises(InputError, match="give the policy a critic"):
        method.objective(outputs_of(logp), prepared(method, batch))
