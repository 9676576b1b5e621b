"""Methods with given prefixes and second prompts: losses by loops in double precision, and the rewards of their cards.

What their rollouts sample is in tests/rollouts/test_prefixes.py and test_second_prompts.py.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import advantages, batch_of, loss_of, outputs_of, random_batch
from test_actor_critic import check, critic_batch, gae_loop, loop_rows, losses, whiten_loop

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.guidance.a2fm_apo import a2fm_apo
from jaxrl_llm.algorithms.guidance.drpo_dataset_reset import drpo_dataset_reset
from jaxrl_llm.algorithms.guidance.masa import masa
from jaxrl_llm.algorithms.guidance.prefixrl import prefixrl
from jaxrl_llm.algorithms.guidance.spark_co_evolving import spark_co_evolving
from jaxrl_llm.algorithms.guidance.zppo import zppo
from jaxrl_llm.core.algorithm import Algorithm

GIVEN = np.array([0, 1, 2, 0, 3, 1, 0, 2, 1, 0, 0])  # given tokens at the beginning of the rows


def masked(batch: Any) -> Any:
    """The batch with given tokens at the beginning of its rows, each of which keeps an action."""
    mask = np.asarray(batch.action_mask)
    given = np.minimum(GIVEN, mask.sum(axis=1) - 1)
    return batch.replace(action_mask=jnp.asarray(mask & (np.arange(mask.shape[1]) >= given[:, None])))


def test_drpo_by_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewards with the divergence, divided by their standard deviation; PPO's losses on the policy's own tokens."""
    import test_actor_critic

    cut_off = np.arange(11) % 3 == 0

    def given_batch(**fields: Any) -> Any:
        batch, logp, V = critic_batch(**fields)
        return masked(batch).replace(truncated=jnp.asarray(cut_off)), logp, V

    monkeypatch.setattr(test_actor_critic, "critic_batch", given_batch)
    rows_of = loop_rows(given_batch()[0])

    def loop(logp: Any, V: Any) -> float:
        rows = rows_of(logp=logp, V=V)
        rewards = []
        for row, is_cut in zip(rows, cut_off[~np.isnan(given_batch()[0].reward)], strict=True):
            r = [-0.05 * (o - f) for o, f in zip(row.old, row.reference, strict=True)]
            r[-1] += -1.0 if is_cut else row.score
            rewards.append(r)
        every = [x for row, r in zip(rows, rewards, strict=True) if row.scored for x in r]
        mean, std = np.mean(every), np.std(every, ddof=1)
        for row, r in zip(rows, rewards, strict=True):
            row.A = gae_loop([(x - mean) / std + mean for x in r], row.V_old, 1.0, 0.95)
            row.R = [a + v for a, v in zip(row.A, row.V_old, strict=True)] if row.scored else None
        whiten_loop(rows)
        policy, value = losses(rows, 0.2, 0.2, 0.2)
        return policy + 0.1 * value

    check(drpo_dataset_reset(), loop)


def test_drpo_worked_example() -> None:
    """Token losses with two given tokens in the first row: 1.2/6."""
    of_tokens = np.array([[0.3, 0.1, -0.2, 0.4], [0.1, 0.2, 0.3, 0.4]])
    mask = np.array([[0, 0, 1, 1], [1, 1, 1, 1]], bool)
    zeros = np.zeros((2, 4))
    batch = batch_of(mask, np.zeros(2), zeros, values=zeros).replace(
        advantages=jnp.asarray(-of_tokens * mask), returns=jnp.asarray(zeros)
    )
    loss, _ = drpo_dataset_reset().objective(outputs_of(zeros, values=zeros), batch)
    assert float(loss) == pytest.approx(0.2)


def contexts(algorithm: Algorithm, average: str, low: float, high: float, ddof: int, dual: float = np.inf) -> None:
    """The clipped loss with the baseline of each group, given tokens left out, against a loop."""
    batch, logp = random_batch(3)
    batch = masked(batch)
    mask, old = np.asarray(batch.action_mask), np.asarray(batch.behaviour_logp, np.float64)
    reward, group = np.asarray(batch.reward, np.float64), np.asarray(batch.group)
    rows = []
    for i in range(len(reward)):
        own = reward[group == group[i]]
        A = (reward[i] - own.mean()) / (own.std(ddof=ddof) + 1e-6)
        row = []
        for t in np.flatnonzero(mask[i]):
            rho = np.exp(logp[i, t] - old[i, t])
            gain = min(rho * A, np.clip(rho, 1 - low, 1 + high) * A)
            row.append(-(max(gain, dual * A) if A < 0 else gain))
        rows.append(row)
    every = [x for row in rows for x in row] if average == "token" else [np.mean(row) for row in rows]
    assert loss_of(algorithm, batch, logp) == pytest.approx(np.mean(every), rel=2e-5)


def test_prefixrl_is_the_loop_over_contexts() -> None:
    contexts(prefixrl(), "sequence", 0.2, 0.2, 1)


def test_masa_is_the_loop_over_both_groups() -> None:
    contexts(masa(dual_clip=1.05), "token", 0.2, 0.28, 1, 1.05)


def test_spark_is_the_loop_over_its_questions() -> None:
    contexts(spark_co_evolving(kl_coefficient=0.0), "sequence", 0.2, 0.2, 1)
    batch, logp = random_batch(3)
    assert loss_of(spark_co_evolving(), batch, logp) == pytest.approx(loss_of(grpo(kl_coefficient=0.001), batch, logp))


def test_apo_worked_example() -> None:
    """Forced samples of three modes and free ones; advantages with the population's standard deviation."""
    reward = np.array([1, 0, 0, 0, 0, 1, 0.8, 0.8, 1])
    found = advantages(a2fm_apo(), batch_of(np.ones((9, 1)), reward, np.zeros((9, 1))))[:, 0]
    np.testing.assert_allclose(found[[0, 1, 6]], [1.056034, -1.104035, 0.624020], atol=5e-6)
    contexts(a2fm_apo(), "sequence", 0.2, 0.2, 0)


@pytest.mark.heavy
def test_zppo_worked_example_and_loop() -> None:
    """Groups without a signal do not enter the moments, and a step keeps the groups of the hardest problems."""
    R = np.array([[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 0, 1], [1, 1, 1, 1]], float)
    batch = batch_of(np.ones((16, 1)), R.reshape(-1), np.zeros((16, 1)), np.repeat(np.arange(4), 4))
    found = advantages(zppo(), batch)[:, 0].reshape(4, 4)
    expected = [[1.732051, *[-0.577350] * 3], [0] * 4, [0.577350, 0.577350, -1.732051, 0.577350], [0] * 4]
    np.testing.assert_allclose(found, expected, atol=1e-5)
    batch, logp = random_batch(5, (4, 4, 3, 2, 2))
    # Groups 3 and 4 are of second prompts, of which share 0.5 of 3 plain groups, 1, is kept: that of part 1.
    part, solved = np.repeat([0, 0, 0, 2, 1], [4, 4, 3, 2, 2]), np.repeat([0.25, 1, 0.25, 0.25, 0.25], [4, 4, 3, 2, 2])
    batch = batch.with_info(part=jnp.asarray(part, jnp.float32), solved=jnp.asarray(solved, jnp.float32))
    mask, old = np.asarray(batch.action_mask), np.asarray(batch.behaviour_logp, np.float64)
    reward, group = np.asarray(batch.reward, np.float64), np.asarray(batch.group)
    kept = part != 2
    centred = np.array([reward[i] - reward[group == group[i]].mean() for i in range(len(group))])
    signal = kept & np.array([np.ptp(reward[group == group[i]]) > 0 for i in range(len(group))])
    A = np.where(signal, centred / (centred[signal].std() + 1e-6), 0)
    terms = []
    for i, t in np.argwhere(mask & kept[:, None]):
        rho = np.exp(logp[i, t] - old[i, t])
        terms.append(-min(rho * A[i], np.clip(rho, 0.8, 1.28) * A[i]))
    algorithm = zppo(second_share=0.5, replay_share=0.0)
    assert loss_of(algorithm, batch, logp) == pytest.approx(np.mean(terms), rel=2e-5)
