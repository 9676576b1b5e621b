"""Methods of token credit against their worked examples and slow loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, finite_differences, gradient_of, loss_of, outputs_of, prepared, random_batch
from token_loops import agrees, clipped_loss, doubles, group_scores

from jaxrl_llm.advantages.multipliers import capped_bonus
from jaxrl_llm.algorithms.credit.bupo import bupo
from jaxrl_llm.algorithms.credit.dgpo_distribution_guided import dgpo_distribution_guided, hellinger, softmax_shares
from jaxrl_llm.algorithms.credit.rlvr_temporal_schedule import rlvr_temporal_schedule
from jaxrl_llm.algorithms.credit.verl_velocity_rank import verl_velocity_rank
from jaxrl_llm.selection.rows import late_tokens, top_tokens

pytestmark = pytest.mark.heavy

close = np.testing.assert_allclose


@pytest.mark.parametrize(
    ("squared", "w"),
    [(True, [0.933736, 1.179278, 0.962711, 0.924275]), (False, [0.870540, 1.514727, 0.844118, 0.770614])],
)
def test_the_worked_example_of_dgpo(squared: bool, w: list[float]) -> None:
    p = np.array([[0.7, 0.2, 0.1], [0.5, 0.3, 0.2], [0.98, 0.01, 0.01], [0.4, 0.4, 0.2]])
    q = np.array([[0.6, 0.3, 0.1], [0.1, 0.3, 0.6], [0.5, 0.25, 0.25], [0.4, 0.4, 0.2]])
    affinity = np.sqrt(p * q).sum(axis=1)[None]
    close(hellinger(jnp.float32(affinity)), [[0.006977, 0.129983, 0.2, 0]], atol=1e-6)
    h = -(p * np.log(p)).sum(axis=1)[None] / np.log(3)
    close(h, [[0.729847, 0.937231, 0.101858, 0.960230]], atol=1e-6)
    s = hellinger(jnp.float32(affinity), squared) * h
    # In single precision 1 - 1 is within 1e-7 of 0, of which the root is 3e-4.
    close(softmax_shares(s, s > -1, 0.5)[0], w, atol=2e-6 if squared else 1e-3)


def test_dgpo_against_a_loop() -> None:
    batch, logp = random_batch(0)
    mask, H = np.asarray(batch.action_mask), doubles(batch.entropy)
    affinity = np.random.default_rng(1).uniform(0.3, 1.0, logp.shape)
    batch = batch.with_info(reference_affinity=jnp.where(mask, affinity, jnp.nan))
    scores, A = group_scores(batch.reward, batch.group), np.zeros(logp.shape)
    for i in range(len(A)):
        places = np.flatnonzero(mask[i])
        e = [np.exp((1 - affinity[i, t]) * (H[i, t] / np.log(20)) ** 1.5 / 0.2) for t in places]
        for t, x in zip(places, e, strict=True):
            A[i, t] = scores[i] * len(places) * x / sum(e)
    algorithm = dgpo_distribution_guided(tau=0.2, kappa=1.5, vocabulary_size=20)
    agrees(algorithm, batch, logp, A, average="sequence")


def test_the_worked_example_of_the_schedules() -> None:
    """Prefixes of 9, 4 and 0 of 10 tokens are dropped at steps 0, 40 and 80 of 100; or 1, 6 and 10 forks are kept."""
    H = np.array([[0.1, 1.2, 0.4, 2, 0.05, 0.9, 0.3, 1.5, 0.2, 0.6]])
    batch = batch_of(np.ones((2, 10)), [0.0, 1.0], np.zeros((2, 10)), entropy=np.repeat(H, 2, axis=0))
    for step, skipped, forks in ((0, 9, [3]), (40, 4, [1, 2, 3, 5, 7, 9]), (80, 0, list(range(10)))):
        late = prepared(rlvr_temporal_schedule(), batch, ((), jnp.int32(step))).loss_weights[0]
        np.testing.assert_array_equal(np.flatnonzero(late), np.arange(skipped, 10))
        kept = prepared(rlvr_temporal_schedule("forking"), batch, ((), jnp.int32(step))).loss_weights[0]
        np.testing.assert_array_equal(np.flatnonzero(kept), forks)
    full = np.ones((1, 100), bool)
    assert int(top_tokens(jnp.zeros((1, 100)), full, 1 - jnp.float32(0.99), jnp.zeros((1, 100)), "row").sum()) == 1
    assert int(late_tokens(jnp.arange(100)[None], jnp.float32([100]), jnp.float32(0.99)).sum()) == 1


def test_the_worked_example_of_the_entropy_bonus() -> None:
    A, H = jnp.float32([[0.8, 0.8], [-0.8, -0.8]]), np.array([[0.5, 3], [0.5, 3]])
    algorithm = rlvr_temporal_schedule("bonus")
    batch = batch_of(np.ones((2, 2)), [0.0, 0.0], np.zeros((2, 2)), entropy=H, advantages=A)
    x = 0.99
    found = A + x * (capped_bonus(A, 0.4 * jnp.float32(H), 1 / 2) - A)
    close(found, [[0.998, 1.196], [-0.602, -0.404]], atol=1e-6)
    assert not np.asarray(prepared(algorithm, batch).advantages).any()


@pytest.mark.parametrize("rule", ["percentile", "forking", "bonus"])
def test_rlvr_schedule_against_a_loop(rule: str) -> None:
    batch, logp = random_batch(1)
    mask, H = np.asarray(batch.action_mask), doubles(batch.entropy)
    A = np.broadcast_to(group_scores(batch.reward, batch.group)[:, None], logp.shape).copy()
    weights = np.ones(logp.shape)
    for i in range(len(A)):
        T = int(mask[i].sum())
        if rule == "percentile":
            weights[i, : min(int(T * 0.6), T - 1)] = 0
        elif rule == "forking":
            weights[i, np.argsort(-np.where(mask[i], H[i], -1))[int(np.ceil(T * 0.4 - 1e-9)) :]] = 0
        else:
            A[i] += 0.6 * np.minimum(0.4 * H[i], np.abs(A[i]) / 2)
    algorithm = rlvr_temporal_schedule(rule, magnitude=0.6)
    agrees(algorithm, batch, logp, A, weights, high=0.28)
    # After the fade this is the plain loss.
    plain = np.broadcast_to(group_scores(batch.reward, batch.group)[:, None], logp.shape)
    agrees(algorithm, batch, logp, plain, None, ((), jnp.int32(80)))


def test_verl_against_a_loop() -> None:
    batch, logp = random_batch(2)
    random = np.random.default_rng(2)
    algorithm = verl_velocity_rank(kl_coefficient=0.0, entropy_coefficient=0.0)
    state, mu = algorithm.transform.init(), np.zeros(3)
    scores = group_scores(batch.reward, batch.group)
    for step in range(3):
        measures = random.uniform(0.5, 2.0, (11, 3))
        state, ready = algorithm.transform.apply(state, batch.with_info(effective_rank=jnp.float32(measures)))
        A = np.zeros(11)
        for i in range(11):
            d = np.clip((measures[i] - mu) / (np.abs(mu) + 1e-8), -5, 5)
            b = 1 / (1 + np.exp(-2 * d[2]))
            bonus = max(b * np.tanh(d[0]) + (1 - b) * np.tanh(d[1]), 0) if step else 0.0
            A[i] = scores[i] + min(bonus, abs(scores[i]) / 2)
        close(ready.advantages, A[:, None] * np.asarray(batch.action_mask), atol=1e-5)
        mu = 0.7 * mu + 0.3 * measures.mean(axis=0)
    agrees(algorithm, batch.with_info(effective_rank=jnp.ones((11, 3))), logp, scores[:, None] + 0 * logp)
    last = verl_velocity_rank(place="last", start="first")
    state, _ = last.transform.apply(last.transform.init(), batch.with_info(effective_rank=jnp.ones((11, 3))))
    close(state[1][0], np.ones(3))
    _, ready = last.transform.apply(state, batch.with_info(effective_rank=jnp.full((11, 3), 2.0)))
    moved = np.abs(np.asarray(ready.advantages) - scores[:, None] * np.asarray(batch.action_mask)) > 1e-3
    np.testing.assert_array_equal(moved.sum(axis=1), np.ones(11))
    assert last.needs == {"effective_rank", "reference_logp"}


def test_the_worked_example_of_bupo() -> None:
    p = np.array([0.628532, 0.231224, 0.140244])
    logp, old = np.log(p)[:, None], np.array([[-0.7], [-1.4], [-2]])
    batch = batch_of(np.ones((3, 1)), [0.0, 0, 1], np.zeros((3, 1)), info={"internal_logp": old})
    ready = prepared(bupo(), batch).replace(advantages=jnp.float32([[1], [-1], [1]]))
    loss = bupo().objective(outputs_of(np.zeros((3, 1)), internal_logp=logp), ready)[0]
    assert float(loss) == pytest.approx(-0.432871, abs=1e-6)
    assert bupo(layer=5).needs == {"internal_logp:5"}


def test_bupo_against_a_loop() -> None:
    batch, logp = random_batch(3)
    mask, random = np.asarray(batch.action_mask), np.random.default_rng(3)
    old = -random.gamma(2.0, 0.5, logp.shape)
    inner = old + 0.2 * random.normal(size=logp.shape)
    batch = batch.with_info(internal_logp=jnp.float32(old))
    A = np.broadcast_to(group_scores(batch.reward, batch.group)[:, None], logp.shape)
    algorithm = bupo(internal_steps=1)
    ready = prepared(algorithm, batch)

    def loss(inner: Any) -> Any:
        return algorithm.objective(outputs_of(logp, internal_logp=inner), ready)[0]

    def loop(inner: Any) -> float:
        return clipped_loss(inner, old, A, mask, average="sequence")

    value, gradient = jax.value_and_grad(loss)(jnp.float32(inner))
    assert float(value) == pytest.approx(loop(inner), abs=1e-5)
    close(gradient, finite_differences(loop, inner), atol=2e-5)
    # In the first phase the output policy has no gradient, afterwards only the output policy has one.
    assert not gradient_of(algorithm, batch, logp, internal_logp=inner).any()
    after = prepared(algorithm, batch, ((), jnp.int32(1)))
    late = algorithm.objective(outputs_of(logp, internal_logp=inner), after)[0]
    expected = clipped_loss(logp, batch.behaviour_logp, A, mask, average="sequence")
    assert float(late) == pytest.approx(expected, abs=1e-5)
    token = loss_of(bupo(average="token"), batch, logp, internal_logp=inner)
    assert token == pytest.approx(clipped_loss(inner, old, A, mask), abs=1e-5)
