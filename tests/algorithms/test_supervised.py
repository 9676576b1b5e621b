"""Supervised methods against loops over the vocabulary and over groups, in double precision."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, gradient_of, loss_of, outputs_of, prepared, random_batch

from jaxrl_llm.algorithms.classic.sft import sft
from jaxrl_llm.algorithms.score_function.otr import otr
from jaxrl_llm.algorithms.score_function.pa_rl import pa_rl
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.utils.errors import InputError

LOGITS = np.array([[1, 0.5, 0, -0.5], [0.3, -1, 2, 0]])


def gradient(algorithm: Algorithm, labels: list[int], k: float, shown: list[float]) -> np.ndarray:
    """d loss / d logits; the old policy is the current one."""
    z = jnp.asarray(LOGITS[: len(labels)], jnp.float32)
    place = jnp.arange(len(labels)), jnp.asarray(labels)
    logp, heated = (np.asarray(jax.nn.log_softmax(x, axis=1)[place][:, None]) for x in (z, z / k))
    info = {"demonstrated": np.array(shown), "heated_logp": heated}
    ready = prepared(algorithm, batch_of(np.ones((len(labels), 1)), np.zeros(len(labels)), logp, info=info))

    def loss(z: jax.Array) -> jax.Array:
        now, hot = (jax.nn.log_softmax(x, axis=1)[place][:, None] for x in (z, z / k))
        outputs = outputs_of(np.zeros((len(labels), 1))).replace(logp=now, extras={"heated_logp": hot})
        return algorithm.objective(outputs, ready)[0]

    return np.asarray(jax.grad(loss)(z))


def test_otr_worked_example() -> None:
    """Gradients of the card, at both temperatures."""
    for k, expected in (
        (1.0, [-0.272778, 0.138157, 0.083796, 0.050825]),
        (1.3, [-0.248571, 0.123518, 0.076971, 0.048083]),
    ):
        np.testing.assert_allclose(gradient(otr(temperature=k), [0], k, [1.0])[0], expected, atol=1e-6)


def test_otr_has_the_gradient_of_its_loop_over_the_vocabulary() -> None:
    found = gradient(otr(penalty=-0.4, temperature=1.7), [1, 2], 1.7, [1.0, 1.0])
    loop = np.zeros(LOGITS.shape)
    for i, label in enumerate([1, 2]):
        p, q = (np.exp(x - np.log(np.exp(x).sum())) for x in (LOGITS[i], LOGITS[i] / 1.7))
        for a in range(4):
            reward = 1.0 if a == label else -0.4
            loop[i] -= q[a] * reward * ((np.arange(4) == a) - p) / 2
    np.testing.assert_allclose(found, loop, atol=1e-6)


def test_otr_learns_from_demonstrations_alone() -> None:
    found = gradient(otr(), [1, 2], 1.3, [0.0, 1.0])
    assert not found[0].any()
    np.testing.assert_allclose(found[1], 2 * gradient(otr(), [1, 2], 1.3, [1.0, 1.0])[1], rtol=1e-5)
    with pytest.raises(InputError, match="penalty"):
        otr(penalty=0.5)


def test_pa_rl_is_its_loop() -> None:
    random = np.random.default_rng(4)
    values = random.normal(size=(11, 6))
    batch, logp = random_batch(6, values=values)
    new = random.normal(size=(11, 6))
    algorithm = pa_rl(keep=2, temperature=0.7, value_coefficient=0.5)
    mask, group = np.asarray(batch.action_mask), np.asarray(batch.group)
    last = mask.sum(axis=1) - 1
    Q, V, r = values[np.arange(11), last], new[np.arange(11), last], np.asarray(batch.reward)
    policy, weights = 0.0, np.zeros(11)
    for g in range(3):
        rows = np.flatnonzero(group == g)
        best = sorted(rows, key=lambda i: -Q[i])[:2]
        parts = [np.exp(Q[i] / 0.7) for i in best]
        for i, part in zip(best, parts, strict=True):
            weights[i] = part / sum(parts) * len(rows)
            policy -= weights[i] * logp[i][mask[i]].sum() / 11
    critic = (0.5 * (V - r) ** 2).mean()
    np.testing.assert_allclose(prepared(algorithm, batch).advantages, weights[:, None] * mask, rtol=1e-4)
    np.testing.assert_allclose(loss_of(algorithm, batch, logp, values=new), policy + 0.5 * critic, rtol=1e-4)
    np.testing.assert_allclose(
        gradient_of(algorithm, batch, logp, values=new), -weights[:, None] * mask / 11, rtol=1e-4, atol=1e-7
    )


def test_pa_rl_worked_example_and_limits() -> None:
    """Q = [.3, 1.2, .9, .1], k = 2; with all kept and equal, the likelihood of the samples."""
    values = np.array([[0.3], [1.2], [0.9], [0.1]])
    batch = batch_of(np.ones((4, 1)), [0.0, 1, 0, 1], -np.ones((4, 1)), values=values)
    np.testing.assert_allclose(
        np.asarray(prepared(pa_rl(keep=2), batch).advantages)[:, 0] / 4, [0, 0.574443, 0.425557, 0], atol=1e-6
    )
    same = prepared(pa_rl(keep=4), batch.replace(values=jnp.zeros((4, 1)))).advantages
    np.testing.assert_allclose(same, 1.0, rtol=1e-6)
    np.testing.assert_allclose(prepared(pa_rl(keep=1), batch).advantages[:, 0], [0, 4, 0, 0], rtol=1e-6)


def test_sft_by_loop() -> None:
    batch, logp = random_batch(3, (2, 2))
    action, greedy = np.asarray(batch.action_mask), np.random.default_rng(0).integers(0, 2, logp.shape).astype(float)
    loss = 0.0
    for row in range(len(logp)):
        for t in np.flatnonzero(action[row]):
            loss -= logp[row, t] / action.sum()
    found, metrics = sft().objective(outputs_of(logp).replace(extras={"greedy": greedy}), prepared(sft(), batch))
    assert float(found) == pytest.approx(loss, rel=1e-6)
    assert float(metrics["nll"]) == pytest.approx(loss, rel=1e-6)
    assert float(metrics["mean_token_accuracy"]) == pytest.approx((greedy * action).sum() / action.sum(), rel=1e-6)
    np.testing.assert_allclose(
        gradient_of(sft(report_accuracy=False), batch, logp), -1.0 * action / action.sum(), atol=1e-7
    )
