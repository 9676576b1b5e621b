"""ReLIC's partial updates on batches of windows: a loop in double precision, and the limits in which it is PPO."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import finite_differences, gradient_of, loss_of, outputs_of, prepared, random_batch

from jaxrl_llm.algorithms import get
from jaxrl_llm.algorithms.policy_loss.relic import relic, windows_so_far
from jaxrl_llm.core.rules import Partial
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.utils.errors import InputError

N, L, SIZE, NOW = 11, 6, 2, 7
LAM, GAMMA, COEFFICIENT = 0.8, 0.9, 0.7
# Of each row: it goes on, was finished now, was finished earlier, or finished now without a score.
KIND = np.array([0, 1, 2, 0, 1, 3, 0, 1, 2, 0, 0])


def windows(seed: int = 0) -> tuple[Trajectories, np.ndarray, np.ndarray]:
    """Rows in windows of two tokens, each of a step of its own; current log-probabilities and values."""
    random = np.random.default_rng(seed + 50)
    before = random.normal(size=(N, L))
    batch, logp = random_batch(seed, values=before)
    mask = np.asarray(batch.action_mask)
    number = np.arange(L) // SIZE  # of the window
    last = (mask.sum(axis=1) - 1) // SIZE
    step = (NOW - (KIND == 2) - last)[:, None] + number
    window = mask & (number == last[:, None]) & (KIND != 2)[:, None]
    reward = np.where(KIND == 1, np.asarray(batch.reward), np.nan)
    batch = batch.replace(reward=jnp.asarray(reward, jnp.float32), policy_step=jnp.asarray(step, jnp.int32))
    batch = batch.with_info(window=jnp.asarray(window), unfinished=jnp.asarray(KIND == 0))
    return batch, logp, before + 0.3 * random.normal(size=(N, L))


def tokens_of_update(batch: Trajectories, every: int) -> np.ndarray:
    """bool[N, L]: the tokens that a step trains on, row by row."""
    mask, out = np.asarray(batch.action_mask), np.zeros((N, L), bool)
    for n in range(N):
        count = -(-int(mask[n].sum()) // SIZE)
        if KIND[n] == 1 or (KIND[n] == 0 and count % every == 0):
            out[n] = mask[n]
        elif KIND[n] == 0:
            out[n] = mask[n] & (np.arange(L) >= SIZE * (count - 1))
    return out


def loop_of(batch: Trajectories, every: int) -> Any:
    """(logp, V) -> loss, row by row and token by token."""
    mask, reward, trained = np.asarray(batch.action_mask), np.asarray(batch.reward), tokens_of_update(batch, every)
    old, before = np.asarray(batch.behaviour_logp, np.float64), np.asarray(batch.values, np.float64)

    def loss(logp: np.ndarray, V: np.ndarray) -> float:
        policy, value = list[float](), list[float]()
        for n in range(N):
            places = list(np.flatnonzero(mask[n]))
            after, A = (before[n, places[-1]] if KIND[n] == 0 else 0.0), 0.0
            for t in reversed(places):
                r = reward[n] if t == places[-1] and KIND[n] == 1 else 0.0
                A = r + GAMMA * after - before[n, t] + GAMMA * LAM * A
                R, after = A + before[n, t], before[n, t]
                if trained[n, t]:
                    rho = np.exp(logp[n, t] - old[n, t])
                    policy.append(-min(rho * A, min(max(rho, 0.8), 1.2) * A))
                    value.append(0.5 * (V[n, t] - R) ** 2)
        return float(np.mean(policy) + COEFFICIENT * np.mean(value))

    return loss


@pytest.mark.parametrize("every", [1, 2, 9])
def test_it_is_the_loop(every: int) -> None:
    """Loss and both gradients; only tokens of the update have one."""
    batch, logp, V = windows()
    assert len({tokens_of_update(batch, k).sum() for k in (1, 2, 9)}) == 3, "or the cases are the same"
    method = relic(every, gamma=GAMMA, lam=LAM, value_clip=None, value_coefficient=COEFFICIENT, whiten=False)
    loop, values = loop_of(batch, every), jnp.asarray(V, jnp.float32)
    assert loss_of(method, batch, logp, values=values) == pytest.approx(loop(logp, V), rel=1e-5)
    found = gradient_of(method, batch, logp, values=values)
    np.testing.assert_allclose(found, finite_differences(lambda x: loop(x, V), logp), atol=2e-6)
    ready = prepared(method, batch)
    by_values = jax.grad(lambda v: method.objective(outputs_of(logp, values=v), ready)[0])(values)
    np.testing.assert_allclose(by_values, finite_differences(lambda x: loop(logp, x), V), atol=2e-6)
    np.testing.assert_array_equal(np.asarray(by_values) != 0, tokens_of_update(batch, every))


def test_windows_are_counted_by_the_steps_that_drew_them() -> None:
    batch, _, _ = windows()
    np.testing.assert_array_equal(windows_so_far(batch), -(-np.asarray(batch.action_mask).sum(axis=1) // SIZE))
    none = batch.replace(action_mask=jnp.zeros((N, L), bool))
    assert not np.any(windows_so_far(none))


def test_whole_episodes_are_ppo() -> None:
    batch, logp, V = windows()
    batch = batch.replace(reward=jnp.asarray(np.arange(N) % 2, jnp.float32), info=None)
    plain = get("ppo", kl_coefficient=0.0)
    values = V.astype(np.float32)
    for method in (relic(), relic(1), relic(segments=1)):
        found = gradient_of(method, batch, logp, values=values)
        np.testing.assert_allclose(found, gradient_of(plain, batch, logp, values=values), atol=1e-6)


def test_it_differs_from_ppo_and_from_windows_alone() -> None:
    """From PPO of all tokens so far, and from T-PPO, which never goes back to earlier windows."""
    batch, logp, V = windows()
    mine = gradient_of(relic(9, whiten=False), batch, logp, values=V.astype(np.float32))
    alone = gradient_of(get("t_ppo"), batch, logp, values=V.astype(np.float32))
    assert ((mine != 0) & (alone == 0)).any(axis=1)[KIND == 1].any(), "at the end of an episode"
    always = gradient_of(relic(1, whiten=False), batch, logp, values=V.astype(np.float32))
    assert ((always != 0) & (mine == 0)).any(axis=1)[KIND == 0].any(), "before it"
    assert not mine[KIND >= 2].any()


def test_which_windows_a_run_has() -> None:
    assert relic(max_length=64).strategy == Partial(segment_tokens=8, train_unfinished=True)
    assert relic(segments=3, max_length=64).strategy == Partial(segment_tokens=22, train_unfinished=True)
    assert relic(segments=1, max_length=64).strategy == Partial(train_unfinished=True)
    with pytest.raises(InputError, match="full_every"):
        relic(full_every=0)
