"""T-PPO on batches of windows: a loop in double precision, and the invariances of its loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import finite_differences, gradient_of, loss_of, outputs_of, prepared, random_batch
from experience import Steps, learn, steps_of

from jaxrl_llm.algorithms.classic.ppo import ppo
from jaxrl_llm.algorithms.policy_loss.t_ppo import t_ppo
from jaxrl_llm.core.rules import Partial
from jaxrl_llm.core.trajectory import Trajectories, map_rows
from jaxrl_llm.objectives.values import value_loss
from jaxrl_llm.utils.errors import InputError

pytestmark = pytest.mark.heavy

N, L = 11, 6
LAM, COEFFICIENT = 0.8, 0.7


def windows(seed: int = 0, none_finished: bool = False) -> tuple[Trajectories, np.ndarray, np.ndarray]:
    """Rows that continue, are finished now, or were finished earlier; current log-probabilities and values."""
    random = np.random.default_rng(seed + 40)
    before = random.normal(size=(N, L))
    batch, logp = random_batch(seed, values=before)
    mask = np.asarray(batch.action_mask)
    kind = np.full(N, 0) if none_finished else np.arange(N) % 3  # goes on, finished now, finished earlier
    start = np.where(kind == 2, L, random.integers(0, mask.sum(axis=1)))
    window = mask & (np.arange(L) >= start[:, None])
    reward = np.where(kind == 1, np.asarray(batch.reward), np.nan)
    batch = batch.replace(reward=jnp.asarray(reward, jnp.float32))
    batch = batch.with_info(window=jnp.asarray(window), unfinished=jnp.asarray(kind == 0))
    return batch, logp, before + 0.3 * random.normal(size=(N, L))


def loop_of(batch: Trajectories, clip: float | None = None) -> Any:
    """(logp, V) -> loss, row by row and token by token."""
    window, unfinished = np.asarray(batch.info["window"]), np.asarray(batch.info["unfinished"])
    mask, reward = np.asarray(batch.action_mask), np.asarray(batch.reward, np.float64)
    old, V_old = np.asarray(batch.behaviour_logp, np.float64), np.asarray(batch.values, np.float64)

    def loss(logp: np.ndarray, V: np.ndarray) -> float:
        policy, tokens, value, taught = 0.0, 0, 0.0, 0
        for n in range(N):
            places = list(np.flatnonzero(window[n]))
            A = 0.0
            for i in reversed(range(len(places))):
                t, end = places[i], i + 1 == len(places)
                after = V_old[n, places[i + 1]] if not end else (V_old[n, t] if unfinished[n] else 0.0)
                r = reward[n] if end and not unfinished[n] else 0.0
                A = r + after - V_old[n, t] + LAM * A
                rho = np.exp(logp[n, t] - old[n, t])
                policy -= min(rho * A, min(max(rho, 0.8), 1.2) * A)
                tokens += 1
            if places and not unfinished[n]:
                for t in np.flatnonzero(mask[n]):
                    errors = [(V[n, t] - reward[n]) ** 2]
                    if clip is not None:
                        near = V_old[n, t] + min(max(V[n, t] - V_old[n, t], -clip), clip)
                        errors.append((near - reward[n]) ** 2)
                    value += 0.5 * max(errors)
                    taught += 1
        return policy / tokens + COEFFICIENT * (value / taught if taught else 0.0)

    return loss


@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("none_finished", [False, True])
def test_it_is_its_loop(clip: float | None, none_finished: bool) -> None:
    """Loss and both gradients; where nothing was finished the gradient by values is 0, and no number is NaN."""
    batch, logp, V = windows(none_finished=none_finished)
    algorithm, loop = t_ppo(lam=LAM, value_coefficient=COEFFICIENT, value_clip=clip), loop_of(batch, clip)
    values = jnp.asarray(V, jnp.float32)
    assert loss_of(algorithm, batch, logp, values=values) == pytest.approx(loop(logp, V), rel=2e-5)
    found = gradient_of(algorithm, batch, logp, values=values)
    np.testing.assert_allclose(found, finite_differences(lambda x: loop(x, V), logp), atol=2e-6)
    ready = prepared(algorithm, batch)
    by_values = jax.grad(lambda v: algorithm.objective(outputs_of(logp, values=v), ready)[0])(values)
    np.testing.assert_allclose(by_values, finite_differences(lambda x: loop(logp, x), V), atol=2e-6)
    assert np.any(found)
    assert np.any(by_values) != none_finished
    metrics = algorithm.objective(outputs_of(logp, values=values), ready)[1]
    assert all(np.isfinite(x) for x in metrics.values())


def test_metrics_of_values_are_means_over_what_is_taught() -> None:
    batch, logp, V = windows()
    mask = np.asarray(batch.action_mask) & (np.arange(N) % 3 == 1)[:, None]
    R = np.broadcast_to(np.asarray(batch.reward)[:, None], (N, L))[mask]
    _, found = t_ppo().objective(outputs_of(logp, values=V.astype(np.float32)), prepared(t_ppo(), batch))
    assert float(found["value/mean"]) == pytest.approx(V[mask].mean(), rel=1e-5)
    assert float(found["value/error"]) == pytest.approx(np.abs(V[mask] - R).mean(), rel=1e-5)


def test_whole_responses_are_ppo() -> None:
    """Without windows: PPO with Monte Carlo returns and no whitening, here of lambda 1, where the two are the same."""
    batch, logp, V = windows()
    finished = batch.replace(reward=jnp.asarray(np.arange(N) % 2, jnp.float32), info=None)
    plain = ppo(lam=1.0, whiten=False, kl_coefficient=0.0, value_clip=None)
    found, expected = (loss_of(a, finished, logp, values=V.astype(np.float32)) for a in (t_ppo(lam=1.0), plain))
    assert found == pytest.approx(expected, rel=1e-5)


def parts_of(batch: Trajectories, logp: Any, V: Any, rows: np.ndarray) -> tuple[Trajectories, Any]:
    outputs = outputs_of(np.asarray(logp)[rows], values=np.asarray(V, np.float32)[rows])
    return map_rows(lambda x: x[rows], batch), outputs


def test_order_and_micro_batches_do_not_matter() -> None:
    batch, logp, V = windows()
    algorithm, whole = t_ppo(), np.arange(N)
    steps, sliced = (
        Steps(*map(jax.jit, steps_of(algorithm, parts))) for parts in (None, [whole[:4], whole[4:5], whole[5:]])
    )
    plain = learn(algorithm, [parts_of(batch, logp, V, whole)], steps)
    order = np.random.default_rng(0).permutation(N)
    shuffled = learn(algorithm, [parts_of(batch, logp, V, order)], steps)
    cut = learn(algorithm, [parts_of(batch, logp, V, whole)], sliced)
    for found, back in ((shuffled, np.argsort(order)), (cut, whole)):
        assert float(found.loss) == pytest.approx(float(plain.loss), abs=1e-6)
        for one, two in zip(jax.tree.leaves(plain.gradient), jax.tree.leaves(found.gradient), strict=True):
            np.testing.assert_allclose(np.asarray(two)[back], one, atol=1e-6)


def test_minibatches_add_up_to_the_value_loss_of_the_batch() -> None:
    """Gradient steps on parts with equally many rows that count: the mean of their value losses is the batch's."""
    batch, logp, V = windows()
    batch, outputs = parts_of(batch, logp, V, np.arange(9))  # rows 2, 5 and 8 were finished earlier
    ready, objective = prepared(t_ppo(), batch), value_loss(None)
    parts = (np.array([0, 1, 3, 2]), np.array([4, 5, 6, 7, 8]))
    halves = [map_rows(lambda x, rows=rows: x[rows], ready) for rows in parts]
    found = [
        float(objective(jax.tree.map(lambda x, rows=rows: x[rows], outputs), half)[0])
        for rows, half in zip(parts, halves, strict=True)
    ]
    assert np.mean(found) == pytest.approx(float(objective(outputs, ready)[0]), rel=1e-5)
    assert found[0] != pytest.approx(found[1], rel=0.05)


def test_the_rollout_that_it_asks_for() -> None:
    assert t_ppo(max_length=24).strategy == Partial(segment_tokens=8, train_unfinished=True)
    assert t_ppo(max_length=25, segments=4).strategy == Partial(segment_tokens=7, train_unfinished=True)
    assert t_ppo(max_length=24, segments=1).strategy == Partial(train_unfinished=True)
    assert t_ppo().strategy == Partial(train_unfinished=True)
    assert t_ppo().needs == {"values"}
    with pytest.raises(InputError, match="segments is 0"):
        t_ppo(segments=0)
