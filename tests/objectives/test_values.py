"""Critic losses: errors by their definitions, clipping, heads, and rows without a target."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.policy_loss.safe_entropy_aware import soft_minimum
from jaxrl_llm.core.trajectory import SHARED, PolicyOutputs, Trajectories, map_rows, with_totals
from jaxrl_llm.objectives import sequence_mean
from jaxrl_llm.objectives.values import clipped_error, half_square, huber, last_action_mean, pinball, value_loss
from jaxrl_llm.utils.errors import InputError

N, L = 4, 5
random = np.random.default_rng(0)
MASK = np.array([[1, 1, 0, 1, 1], [0, 1, 1, 0, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], bool)


def nan_outside(x: np.ndarray) -> np.ndarray:
    return np.where(MASK.reshape(N, L, *[1] * (x.ndim - 2)), x, np.nan)


def case(heads: int = 1, seed: int = 0) -> tuple[np.ndarray, Trajectories]:
    """Current values, and a batch with those before and returns; NaN wherever no action is."""
    random = np.random.default_rng(seed)
    shape = (N, L) if heads == 1 else (N, L, heads)
    old, R = random.normal(size=shape), random.normal(size=(N, L))
    zeros, none, mask = jnp.zeros((N, L), jnp.int32), jnp.zeros(N, jnp.int32), jnp.asarray(MASK)
    arrays = {"values": nan_outside(old), "returns": nan_outside(R), "reward": np.array([1.0, 0, 1, 0])}
    batch = Trajectories(zeros, mask, mask, zeros * 1.0, zeros, zeros, none, none, none > 0,
                         **{k: jnp.asarray(x, jnp.float32) for k, x in arrays.items()})  # fmt: skip
    return nan_outside(old + 0.4 * random.normal(size=shape)), batch


def outputs_of(values: Any) -> PolicyOutputs:
    return PolicyOutputs(jnp.zeros((N, L)), jnp.zeros((N, L)), {"values": jnp.asarray(values, jnp.float32)})


def test_errors_by_their_definitions() -> None:
    x = np.array([-2.0, -0.5, -0.1, 0, 0.3, 0.5, 4])
    a = np.abs(x)
    np.testing.assert_allclose(half_square(jnp.asarray(x)), x**2 / 2, atol=1e-6)
    np.testing.assert_allclose(huber(0.5)(jnp.asarray(x)), np.where(a <= 0.5, x**2 / 2, 0.5 * (a - 0.25)), atol=1e-6)
    np.testing.assert_allclose(pinball(0.9)(jnp.asarray(x)), np.where(x < 0, 0.9 * a, 0.1 * a), atol=1e-6)
    for bad in (lambda: huber(0.0), lambda: pinball(1.0), lambda: soft_minimum(0.0), lambda: value_loss(clip=0.0)):
        with pytest.raises(InputError):
            bad()


def test_pinball_learns_the_median() -> None:
    returns = jnp.asarray([0.0, 0, 0, 1, 9])
    slope = jax.grad(lambda v: jnp.mean(pinball(0.5)(v - returns)))
    assert slope(-0.01) < 0 < slope(0.01)
    assert jax.grad(lambda v: jnp.mean(half_square(v - returns)))(2.0) == pytest.approx(0, abs=1e-6)


def test_the_soft_minimum_is_between_the_minimum_and_the_mean() -> None:
    v = jnp.asarray([[[0.8, 0.5]]])
    assert float(soft_minimum(0.3)(v)[0, 0]) == pytest.approx(0.613966, abs=1e-6)
    assert float(soft_minimum(0.001)(v)[0, 0]) == pytest.approx(0.5, abs=1e-3)
    assert float(soft_minimum(1000.0)(v)[0, 0]) == pytest.approx(0.65, abs=1e-3)
    assert soft_minimum()(v[..., 0]) is not None
    np.testing.assert_array_equal(soft_minimum()(v[..., 0]), v[..., 0])


def test_clipped_error_worked_example() -> None:
    V, old, R = ([0.5, 0.25, 0.9, 0.55], [0.2, 0.3, 0.4, 0.6], [0.918450, 0.951, 0.98, 1])
    found = clipped_error(*(jnp.asarray(x) for x in (V, old, R)), 0.2)
    np.testing.assert_allclose(2 * found, [0.268790, 0.491401, 0.1444, 0.2025], atol=1e-6)
    one = clipped_error(jnp.asarray(0.613966), jnp.asarray(0.2), jnp.asarray(0.9), 0.2, huber(0.5), "mean")
    assert float(one) == pytest.approx(0.082954, abs=1e-6)


def test_clipped_error_is_the_maximum_with_its_gradient() -> None:
    """Away from ties between the clipped and the free error, and where both are one; NaN is not hidden."""
    V, old, R = np.random.default_rng(0).normal(size=(3, 200))

    def plain(V: jax.Array) -> jax.Array:
        near = old + jnp.clip(V - old, -0.2, 0.2)
        return jnp.sum(jnp.maximum(0.5 * (V - R) ** 2, 0.5 * (near - R) ** 2))

    found = jax.grad(lambda V: jnp.sum(clipped_error(V, jnp.asarray(old), jnp.asarray(R), 0.2)))(jnp.asarray(V))
    np.testing.assert_allclose(found, jax.grad(plain)(jnp.asarray(V)), rtol=1e-6)
    for place in range(3):
        given = [jnp.asarray(0.5)] * 3
        given[place] = jnp.asarray(jnp.nan)
        assert jnp.isnan(clipped_error(*given, 0.2))


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_loss_is_its_loop(clip: float | None) -> None:
    V, batch = case()
    R, old = np.asarray(batch.returns), np.asarray(batch.values)

    def loop(V: np.ndarray) -> float:
        total = 0.0
        for n, t in zip(*np.nonzero(MASK), strict=True):
            far = (V[n, t] - R[n, t]) ** 2
            near = far if clip is None else (old[n, t] + np.clip(V[n, t] - old[n, t], -clip, clip) - R[n, t]) ** 2
            total += 0.5 * max(far, near)
        return total / MASK.sum()

    (loss, metrics), gradient = jax.value_and_grad(value_loss(clip), has_aux=True)(outputs_of(V), batch)
    assert float(loss) == pytest.approx(loop(V), rel=1e-5)
    assert float(metrics["value/mean"]) == pytest.approx(V[MASK].mean(), abs=1e-6)
    assert float(metrics["value/error"]) == pytest.approx(np.abs(V - R)[MASK].mean(), rel=1e-5)
    assert ("value/clip" in metrics) == (clip is not None)
    g = np.asarray(gradient.extras["values"])
    assert (g[~MASK] == 0).all()
    for place in zip(*np.nonzero(MASK), strict=True):
        step = np.zeros((N, L))
        step[place] = 1e-6
        assert g[place] == pytest.approx((loop(V + step) - loop(V - step)) / 2e-6, abs=1e-5)


def test_rows_without_a_score_teach_nothing() -> None:
    V, batch = case()
    unscored = batch.replace(reward=batch.reward.at[0].set(jnp.nan))
    gradient = jax.grad(lambda o: value_loss()(o, unscored)[0])(outputs_of(V)).extras["values"]
    assert (np.asarray(gradient)[0] == 0).all()
    assert np.abs(gradient[1]).max() > 0
    nothing = batch.replace(action_mask=jnp.zeros((N, L), bool))
    assert float(value_loss()(outputs_of(V), nothing)[0]) == 0


def test_heads_learn_the_same_or_each_its_own() -> None:
    V, batch = case(heads=2)
    each = [batch.replace(values=batch.values[..., h]) for h in range(2)]
    both = float(value_loss(heads=2)(outputs_of(V), batch)[0])
    alone = [float(value_loss()(outputs_of(V[..., h]), each[h])[0]) for h in range(2)]
    assert both == pytest.approx(np.mean(alone), rel=1e-6)
    mixed = float(value_loss(error=(half_square, pinball(0.5)))(outputs_of(V), batch)[0])
    median = float(value_loss(error=pinball(0.5))(outputs_of(V[..., 1]), each[1])[0])
    assert mixed == pytest.approx((alone[0] + median) / 2, rel=1e-6)
    least = soft_minimum(0.3)
    combined = float(value_loss(combine=least, heads=2)(outputs_of(V), batch)[0])
    made = outputs_of(least(jnp.asarray(V, jnp.float32)))
    assert combined == pytest.approx(float(value_loss()(made, batch.replace(values=least(batch.values)))[0]), rel=1e-6)
    assert value_loss(heads=2).needs == {"values:2"}
    with pytest.raises(InputError, match="3 errors for 2 heads"):
        value_loss(error=(half_square,) * 3)(outputs_of(V), batch)


def test_the_last_action_alone() -> None:
    V, batch = case()
    R = np.asarray(batch.returns)
    expected = sum(0.5 * (V[n, t] - R[n, t]) ** 2 for n, t in ((0, 4), (1, 2), (3, 4))) / 3
    assert float(value_loss(None, last_action_mean())(outputs_of(V), batch)[0]) == pytest.approx(expected, rel=1e-5)


def test_the_split_does_not_matter() -> None:
    V, batch = case()
    batch = with_totals(batch.with_controls(explained_variance=jnp.float32(0.4)))
    for objective in (value_loss(), value_loss(average=sequence_mean()), value_loss(None, last_action_mean())):
        whole, metrics = objective(outputs_of(V), batch)
        parts = []
        for rows in (np.array([3, 0]), np.array([1, 2])):
            shared = {name: getattr(batch, name) for name in SHARED}
            cut = map_rows(lambda x, rows=rows: x[rows], batch).replace(**shared)
            parts.append(objective(jax.tree.map(lambda x, rows=rows: x[rows], outputs_of(V)), cut))
        assert float(parts[0][0] + parts[1][0]) == pytest.approx(float(whole), rel=1e-6)
        for name, value in metrics.items():
            assert float(parts[0][1][name] + parts[1][1][name]) == pytest.approx(float(value), rel=1e-5)
        assert float(metrics["value/explained_variance"]) == pytest.approx(0.4)


def test_without_a_critic_it_says_so() -> None:
    _, batch = case()
    with pytest.raises(InputError, match="give the policy a critic"):
        value_loss()(PolicyOutputs(jnp.zeros((N, L)), jnp.zeros((N, L))), batch)
    with pytest.raises(InputError, match="returns"):
        value_loss()(outputs_of(np.zeros((N, L))), batch.replace(returns=None))
