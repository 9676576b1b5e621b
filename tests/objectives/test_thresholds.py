"""The KL threshold's controller step by step, its penalty, distances to a target, and means over some rows."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.policy_loss.ppo_max import distance
from jaxrl_llm.algorithms.policy_loss.safe_entropy_aware import (
    ControllerState,
    excess_penalty,
    kl_threshold,
    next_threshold,
    phase_factor,
    threshold_penalty,
)
from jaxrl_llm.core.trajectory import SHARED, PolicyOutputs, Trajectories, map_rows, with_totals
from jaxrl_llm.objectives import entropy
from jaxrl_llm.objectives.averages import count_tokens, mean_by
from jaxrl_llm.objectives.penalties import imitation

GAINS = (0.3, 0.01, 0.05)
N, L = 3, 4
MASK = np.array([[1, 1, 1, 1], [0, 1, 1, 0], [0, 0, 1, 0]], bool)


def batch_of(reward: float = 0.5, kl: float = 2.0, entropy: float = 1.5) -> Trajectories:
    """Log-ratios to the reference and entropies whose means over the tokens are as given."""
    zeros, none, mask = jnp.zeros((N, L), jnp.int32), jnp.zeros(N, jnp.int32), jnp.asarray(MASK)
    spread = np.where(MASK, [[0.3, -0.3, 0.1, -0.1], [0, 0.2, -0.2, 0], [0, 0, 0, 0]], np.nan)
    return Trajectories(
        zeros, mask, mask, jnp.asarray(spread - 1, jnp.float32), zeros, zeros, none, none, none > 0,
        reward=jnp.asarray([reward - 0.1, reward + 0.1, np.nan], jnp.float32),
        reference_logp=jnp.asarray(np.where(MASK, -1 - kl, np.nan), jnp.float32),
        entropy=jnp.asarray(np.where(MASK, entropy + spread, np.nan), jnp.float32),
    )  # fmt: skip


def test_three_steps_worked_example() -> None:
    transform = kl_threshold()
    state = transform.init()
    seen = []
    for reward in (0.5, 0.6, 0.7):
        state, ready = transform.apply(state, batch_of(reward))
        seen.append([state.kl, state.reward, ready.controls["kl_threshold"], ready.controls["kl_penalty"]])
    expected = [[0.2, 0.5, 0.45, 0], [0.38, 0.505, 0.452160, 0], [0.542, 0.51475, 0.454485, 0.000957]]
    np.testing.assert_allclose(seen, expected, atol=1e-6)


def test_a_batch_without_scores_leaves_the_reward_where_it_was() -> None:
    transform = kl_threshold()
    state, _ = transform.apply(transform.init(), batch_of(0.5))
    after, ready = transform.apply(state, batch_of().replace(reward=jnp.full(N, jnp.nan)))
    assert float(after.reward) == pytest.approx(0.5)
    assert np.isfinite(float(ready.controls["kl_threshold"]))


def test_phases_are_tested_in_their_order() -> None:
    def factor(last: float, before: float, calls: int, spread: float = 0.0) -> float:
        wiggle = spread * jnp.asarray([1.0, -1.0, 1.0, -1.0])
        return float(phase_factor(jnp.concatenate([jnp.full(4, before), last + wiggle]), jnp.int32(calls)))

    assert factor(0.9, 0.9, calls=3) == pytest.approx(1.5)
    assert factor(0.9, 0.5, calls=8) == pytest.approx(1.2)
    assert factor(0.9, 0.5, calls=7) == pytest.approx(1.0)  # the half before is not full, so it cannot climb
    assert factor(0.9, 0.9, calls=8) == pytest.approx(1.0)
    assert factor(0.9, 0.9, calls=8, spread=0.05) == pytest.approx(0.8)
    assert factor(0.6, 0.6, calls=8) == pytest.approx(0.8)


def test_the_controller_is_its_loop() -> None:
    random, window = np.random.default_rng(0), 3
    state = ControllerState(jnp.int32(0), *(jnp.float32(0) for _ in range(4)), jnp.zeros(2 * window))
    kl_average = ema = before = total = 0.0
    history: list[float] = []
    step = jax.jit(lambda state, kl, r: next_threshold(state, kl, r, 0.3, GAINS))
    for call in range(12):
        kl, r = float(random.gamma(2.0)), float(0.6 + 0.03 * call + 0.05 * random.normal())
        kl_average, history = 0.9 * kl_average + 0.1 * kl, [*history, r]
        if call == 0:
            ema, error = r, 0.0
        else:
            error = 0.95 * ema + 0.05 * r - ema - 0.001
            ema = 0.95 * ema + 0.05 * r
        total = min(max(total + error, -1), 1)
        adjust, before = 0.3 * error + 0.01 * total + 0.05 * (error - before), error
        last = history[-window:]
        previous = history[-2 * window : -window] if len(history) >= 2 * window else last
        if len(history) < window:
            phase = 1.5
        elif np.mean(last) - np.mean(previous) > 0.01:
            phase = 1.2
        else:
            phase = 1.0 if np.std(last) < 0.02 and np.mean(last) > 0.7 else 0.8
        state, threshold = step(state, jnp.float32(kl), jnp.float32(r))
        assert float(threshold) == pytest.approx(min(max((0.3 + adjust) * phase, 0.1), 0.6), abs=1e-5)
        assert float(state.kl) == pytest.approx(kl_average, rel=1e-5)


def test_penalty_worked_example_and_slope() -> None:
    numbers = (jnp.float32(0.4), jnp.float32(0.36), jnp.float32(1.5))
    penalty, slope = excess_penalty(*numbers, 0.1, 2.0)
    assert float(penalty) == pytest.approx(0.0002, abs=1e-8)
    by_difference = jax.grad(lambda kl: excess_penalty(kl, *numbers[1:], 0.1, 2.0)[0])(numbers[0])
    assert float(slope) == pytest.approx(float(by_difference), rel=1e-5)
    base, _ = excess_penalty(*numbers[:2], jnp.float32(100.0), 0.1, 2.0)
    assert float(base) == pytest.approx(0.5 * 0.00016, abs=1e-8)
    assert [float(x) for x in excess_penalty(jnp.float32(0.3), *numbers[1:], 0.1, 2.0)] == [0, 0]


def test_the_loss_shows_the_penalty_and_its_gradient_is_the_divergence() -> None:
    batch = batch_of().with_controls(
        kl_threshold=jnp.float32(0.4), kl_penalty=jnp.float32(0.03), kl_slope=jnp.float32(2)
    )
    random = np.random.default_rng(1)
    outputs = PolicyOutputs(jnp.asarray(np.where(MASK, random.normal(size=(N, L)), np.nan)), jnp.zeros((N, L)))
    l = np.asarray(outputs.logp - batch.reference_logp)
    for with_gradient in (True, False):
        grad_fn = jax.value_and_grad(threshold_penalty(with_gradient), has_aux=True)
        (loss, metrics), gradient = grad_fn(outputs, batch)
        assert float(loss) == pytest.approx(0.03, rel=1e-5)
        assert float(metrics["kl"]) == pytest.approx(l[MASK].mean(), rel=1e-5)
        assert float(metrics["kl/threshold"]) == pytest.approx(0.4, rel=1e-5)
        np.testing.assert_allclose(
            gradient.logp, np.where(MASK, 2 * l / MASK.sum(), 0) * with_gradient, rtol=1e-5, atol=1e-7
        )


def sliced(objective: object, outputs: PolicyOutputs, batch: Trajectories) -> float:
    """The loss as the sum over single rows, after a refresh on the whole batch."""
    whole = objective.refreshed(outputs, with_totals(batch))  # type: ignore[attr-defined]
    shared, total = {name: getattr(whole, name) for name in SHARED}, 0.0
    for n in range(N):
        cut = map_rows(lambda x, n=n: x[n : n + 1], whole).replace(**shared)
        total += float(objective.function(jax.tree.map(lambda x, n=n: x[n : n + 1], outputs), cut)[0])  # type: ignore[attr-defined]
    return total


@pytest.mark.parametrize("target", [0.5, 4.0])
def test_the_distance_of_the_whole_batch_to_a_target(target: float) -> None:
    H = np.where(MASK, np.random.default_rng(2).gamma(2.0, size=(N, L)), np.nan)
    outputs, batch = PolicyOutputs(jnp.zeros((N, L)), jnp.asarray(H, jnp.float32)), batch_of()
    objective = distance(entropy(), target)
    (loss, _), gradient = jax.value_and_grad(objective, has_aux=True)(outputs, batch)
    assert float(loss) == pytest.approx(abs(H[MASK].mean() - target), rel=1e-5)
    side = 1 if H[MASK].mean() > target else -1
    np.testing.assert_allclose(gradient.entropy, np.where(MASK, side / MASK.sum(), 0), atol=1e-7)
    assert sliced(objective, outputs, batch) == pytest.approx(float(loss), rel=1e-5)


def test_a_mean_over_the_tokens_of_some_rows() -> None:
    logp = np.where(MASK, np.random.default_rng(3).normal(size=(N, L)), np.nan)
    outputs = PolicyOutputs(jnp.asarray(logp, jnp.float32), jnp.zeros((N, L)))

    def right(batch: Trajectories) -> jax.Array:
        return (batch.scores > 0.5).astype(jnp.float32)

    objective = imitation(right, mean_by("right"))
    _, batch = count_tokens(right, "right").apply((), batch_of())
    assert float(batch.controls["right"]) == 2  # the second row alone is above 0.5, and the third has no score
    assert float(objective(outputs, batch)[0]) == pytest.approx(-logp[1][MASK[1]].mean(), rel=1e-5)
    assert sliced(objective, outputs, batch) == pytest.approx(float(objective(outputs, batch)[0]), rel=1e-5)
    _, none = count_tokens(right, "right").apply((), batch_of(reward=-1.0))
    loss, gradient = jax.value_and_grad(lambda o: objective(o, none)[0])(outputs)
    assert float(loss) == 0
    assert (np.asarray(gradient.logp) == 0).all()
