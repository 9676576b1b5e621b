"""PPO and its variants: worked examples, and loops in double precision over plain lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, finite_differences, gradient_of, loss_of, outputs_of, prepared, random_batch

from jaxrl_llm.algorithms.classic.ppo import ppo
from jaxrl_llm.algorithms.classic.vapo import vapo
from jaxrl_llm.algorithms.classic.vc_ppo import vc_ppo
from jaxrl_llm.algorithms.policy_loss.ppo_max import ppo_max
from jaxrl_llm.algorithms.policy_loss.safe_entropy_aware import safe_entropy_aware
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.utils.errors import InputError


class Row:
    """The actions of one row, as lists of numbers."""

    def __init__(self, mask: np.ndarray, score: float, arrays: dict[str, np.ndarray]) -> None:
        self.score, self.scored = score, not np.isnan(score)
        self.A: list[float] = []
        self.R: list[float] | None = None
        for name, x in arrays.items():
            setattr(self, name, list(x[mask]))


def loop_rows(batch: Trajectories) -> Callable[..., list[Any]]:
    """The scored rows of a batch, with more arrays by name [N, L, ...]."""
    given = {"old": batch.behaviour_logp, "reference": batch.reference_logp, "V_old": batch.values}
    known = {name: np.asarray(x, np.float64) for name, x in given.items()}
    mask, score = np.asarray(batch.action_mask), np.asarray(batch.reward, np.float64)

    def rows(**arrays: np.ndarray) -> list[Any]:
        return [
            Row(mask[n], score[n], {name: x[n] for name, x in {**known, **arrays}.items()})
            for n in range(len(mask))
            if not np.isnan(score[n])
        ]

    return rows


def gae_loop(rewards: list[float], values: list[float], gamma: float, lam: float) -> list[float]:
    out: list[float] = []
    after = running = 0.0
    for r, v in zip(reversed(rewards), reversed(values), strict=True):
        running = r + gamma * after - v + gamma * lam * running
        after = v
        out.insert(0, running)
    return out


def credit(row: Any, gamma: float, lam: float, lam_critic: float, beta: float = 0.0, scale: float = 1.0) -> None:
    """Write row.A and row.R."""
    r = [-beta * (o - f) for o, f in zip(row.old, row.reference, strict=True)]
    r[-1] += row.score / scale
    row.A = gae_loop(r, row.V_old, gamma, lam)
    row.R = [a + v for a, v in zip(gae_loop(r, row.V_old, gamma, lam_critic), row.V_old, strict=True)]
    if not row.scored:
        row.A, row.R = [0.0] * len(row.A), None


def whiten_loop(rows: list[Any], epsilon: float = 1e-8) -> None:
    every = [a for row in rows if row.scored for a in row.A]
    mean = sum(every) / len(every)
    variance = sum((a - mean) ** 2 for a in every) / (len(every) - 1)
    for row in rows:
        row.A = [(a - mean) / np.sqrt(variance + epsilon) if row.scored else 0.0 for a in row.A]


def losses(rows: list[Any], low: float, high: float, value_clip: float, dual: float | None = None) -> list[float]:
    """Policy loss and value loss, means over all tokens."""
    policy = value = count = 0.0
    for row in rows:
        for t, A in enumerate(row.A):
            rho, count = np.exp(row.logp[t] - row.old[t]), count + 1
            one = max(-A * rho, -A * min(max(rho, 1 - low), 1 + high))
            policy += min(one, -A * dual) if dual is not None and A < 0 else one
            if row.R is not None:
                near = min(max(row.V[t], row.V_old[t] - value_clip), row.V_old[t] + value_clip)
                value += 0.5 * max((row.V[t] - row.R[t]) ** 2, (near - row.R[t]) ** 2)
    return [policy / count, value / count]


def critic_batch(seed: int = 0, **fields: Any) -> tuple[Trajectories, np.ndarray, np.ndarray]:
    """A ragged batch with a row that has no score, current log-probabilities, and current values."""
    random = np.random.default_rng(seed + 100)
    before = random.normal(size=(11, 6))
    batch, logp = random_batch(seed, values=before, **fields)
    return batch.replace(reward=batch.reward.at[2].set(jnp.nan)), logp, before + 0.3 * random.normal(size=(11, 6))


def check(algorithm: Algorithm, loop: Callable[[Any, Any], float], **fields: Any) -> None:
    """Loss and both gradients (by log-probabilities and by values) are those of the loop."""
    batch, logp, V = critic_batch(**fields)
    assert loss_of(algorithm, batch, logp, values=jnp.asarray(V, jnp.float32)) == pytest.approx(loop(logp, V), rel=2e-5)
    found = gradient_of(algorithm, batch, logp, values=jnp.asarray(V, jnp.float32))
    mask = np.asarray(batch.action_mask)
    np.testing.assert_allclose(found, finite_differences(lambda x: loop(x, V), logp) * mask, atol=2e-6)
    ready = prepared(algorithm, batch)
    by_values = jax.grad(lambda v: algorithm.objective(outputs_of(logp, values=v), ready)[0])(
        jnp.asarray(V, jnp.float32)
    )
    np.testing.assert_allclose(by_values, finite_differences(lambda x: loop(logp, x), V) * mask, atol=2e-6)


@pytest.mark.parametrize("kl_in", ["reward", "loss"])
def test_ppo_is_its_loop(kl_in: str) -> None:
    batch = critic_batch()[0]
    rows_of = loop_rows(batch)
    algorithm = ppo(
        0.1, 0.15, dual_clip=1.05, gamma=0.9, lam=0.8, value_coefficient=0.7, kl_coefficient=0.1, kl_in=kl_in
    )

    def loop(logp: Any, V: Any) -> float:
        rows = rows_of(logp=logp, V=V)
        for row in rows:
            credit(row, 0.9, 0.8, 0.8, 0.1 if kl_in == "reward" else 0.0)
        whiten_loop(rows)
        policy, value = losses(rows, 0.1, 0.15, 0.2, 1.05)
        k = [0.5 * (a - b) ** 2 for row in rows for a, b in zip(row.logp, row.reference, strict=True)]
        return policy + 0.7 * value + (0.1 * sum(k) / len(k) if kl_in == "loss" else 0.0)

    check(algorithm, loop)


def test_the_numbers_of_ppo_and_its_values() -> None:
    mask, r = np.array([[1, 1, 0, 1, 1]], bool), [1.0]
    batch = batch_of(mask, r, np.zeros((1, 5)), values=np.array([[0.2, 0.3, 9, 0.4, 0.6]]))
    ready = prepared(ppo(kl_coefficient=0.0), batch)
    np.testing.assert_allclose(ready.advantages[0], [0.956117, 0.464155, 0, -0.053700, -1.366571], atol=2e-6)
    np.testing.assert_allclose(ready.returns[0][mask[0]], [0.918450, 0.951, 0.98, 1], atol=1e-6)
    plain = prepared(ppo(kl_coefficient=0.0, whiten=False, lam=1.0), batch)
    np.testing.assert_allclose(plain.advantages[0], [0.8, 0.7, 0, 0.6, 0.4], atol=1e-6)
    V = np.array([[0.5, 0.25, 7, 0.9, 0.55]], np.float32)
    _, metrics = ppo(kl_coefficient=0.0).objective(outputs_of(np.zeros((1, 5)), values=V), ready)
    assert float(metrics["value/loss"]) == pytest.approx(0.138386, abs=1e-6)
    assert float(metrics["value/clip"]) == pytest.approx(0.5)
    A, logp = jnp.asarray([[1.0, -1, -1, 1]]), np.log([[1.5, 0.5, 5, 0.7]])
    signed = batch_of(np.ones((1, 4)), r, np.zeros((1, 4)), values=np.zeros((1, 4)), returns=np.zeros((1, 4)))
    for dual, losses in ((None, [-1.2, 0.8, 5, -0.7]), (3.0, [-1.2, 0.8, 3, -0.7])):
        objective = ppo(dual_clip=dual, kl_coefficient=0.0).objective
        found = objective(outputs_of(logp, values=np.zeros((1, 4), np.float32)), signed.replace(advantages=A))[0]
        assert float(found) == pytest.approx(np.mean(losses), abs=1e-6)


def test_an_adaptive_coefficient_follows_the_divergence() -> None:
    batch = critic_batch()[0]
    far = batch.replace(reference_logp=batch.behaviour_logp - 1.0 * batch.action_mask)
    algorithm = ppo(kl_coefficient=0.1, kl_target=0.5, kl_horizon=100.0)
    state, first = algorithm.transform.apply(algorithm.transform.init(), far)
    _, second = algorithm.transform.apply(state, far)
    assert float(first.controls["kl_coefficient"]) == pytest.approx(0.1)
    assert float(second.controls["kl_coefficient"]) == pytest.approx(0.1 * (1 + 0.2 * 10 / 100))
    fixed = prepared(ppo(kl_coefficient=0.1), far)
    np.testing.assert_allclose(first.advantages, fixed.advantages, atol=1e-6)


def test_on_policy_ppo_is_the_policy_gradient_of_its_advantages() -> None:
    batch, _, V = critic_batch()
    algorithm = ppo(kl_coefficient=0.0)
    ready, old = prepared(algorithm, batch), batch.behaviour_logp
    found = gradient_of(algorithm, batch, old, values=jnp.asarray(V, jnp.float32))
    scored = ~np.isnan(np.asarray(batch.reward))[:, None]
    np.testing.assert_allclose(found, -ready.advantages / (np.asarray(batch.action_mask) & scored).sum(), atol=1e-7)


def test_normalised_returns_make_the_scale_of_rewards_irrelevant_to_the_critic() -> None:
    """After some batches the same batch, with rewards 1000 times as large, teaches the critic the same."""
    algorithm, found = ppo(normalise_returns=True, kl_coefficient=0.0), []
    for size in (1.0, 1000.0):
        state = algorithm.transform.init()
        for seed in (1, 2, 3):
            batch, _ = random_batch(seed, values=np.zeros((11, 6)))
            state, ready = algorithm.transform.apply(state, batch.replace(reward=size * batch.reward))
        found.append(ready)
    mask = np.asarray(found[0].action_mask & ~jnp.isnan(found[0].scores)[:, None])
    assert np.abs(np.asarray(found[0].returns)[mask]).max() < 5
    np.testing.assert_allclose(found[1].returns, found[0].returns, atol=1e-4)
    np.testing.assert_allclose(found[1].advantages, found[0].advantages, atol=1e-4)
    plain = prepared(ppo(kl_coefficient=0.0), random_batch(1, values=np.zeros((11, 6)))[0])
    first = prepared(algorithm, random_batch(1, values=np.zeros((11, 6)))[0])
    np.testing.assert_allclose(first.returns, plain.returns, err_msg="mean 0 and deviation 1 before the first batch")


def test_the_scripts_of_ppo_max_scale_by_the_running_deviation() -> None:
    algorithm = ppo_max(preset="code", kl_coefficient=0.02)
    mask, logp = np.array([[1, 1, 1], [1, 1, 1]], bool), np.array([[-1, -0.5, -2]] * 2)
    batch = batch_of(
        mask, [1.0, 3.0], logp, values=np.array([[0.3, 0.5, 0.6]] * 2), reference_logp=np.array([[-1.2, -0.4, -2]] * 2)
    )
    state, first = algorithm.transform.apply(algorithm.transform.init(), batch)
    np.testing.assert_allclose(first.reward, [0.707107, 2.121320], atol=1e-6)
    _, second = algorithm.transform.apply(state, batch.replace(reward=jnp.asarray([2.0, 6.0])))
    np.testing.assert_allclose(second.reward, [0.925820, 2.777460], atol=1e-6)
    np.testing.assert_allclose(second.token_rewards[0], [-0.004, 0.002, 0], atol=1e-7)
    np.testing.assert_allclose(second.advantages[0], [0.586953, 0.411529, 0.325820], atol=1e-6)
    np.testing.assert_allclose(second.returns[0], [0.886953, 0.911529, 0.925820], atol=1e-6)
    one = second.replace(action_mask=second.action_mask.at[1].set(False))
    new = outputs_of(np.array([[-0.7, -0.6, -2.05]] * 2), values=np.array([[0.6, 0.4, 0.7]] * 2, np.float32))
    loss, metrics = algorithm.objective(new, one)
    assert float(metrics["value/loss"]) == pytest.approx(0.077065, abs=1e-6)
    assert float(loss) == pytest.approx(0.077065 - 0.462213, abs=1e-6)


def test_ppo_max_is_its_loop() -> None:
    batch = critic_batch()[0]
    rows_of = loop_rows(batch)
    algorithm = ppo_max(whiten=True, advantage_clip=1.2)
    scores = [s for s in np.asarray(batch.reward, np.float64) if not np.isnan(s)]

    def loop(logp: Any, V: Any) -> float:
        rows = rows_of(logp=logp, V=V)
        for row in rows:
            row.score = min(max((row.score - np.mean(scores)) / np.std(scores, ddof=1), -0.3), 0.3)
            credit(row, 1.0, 0.95, 0.95, 0.05)
        whiten_loop(rows, 1e-6)
        for row in rows:
            row.A = [min(max(a, -1.2), 1.2) for a in row.A]
        return sum(losses(rows, 0.2, 0.2, 0.2))

    check(algorithm, loop)


def test_ppo_max_normalises_by_all_batches_so_far_and_then_clips() -> None:
    algorithm = ppo_max(reward_clip=0.8)
    batch = batch_of(
        np.ones((2, 1)), [1.0, 3.0], np.zeros((2, 1)), values=np.zeros((2, 1)), reference_logp=np.ones((2, 1))
    )
    state, first = algorithm.transform.apply(algorithm.transform.init(), batch)
    np.testing.assert_allclose(first.reward, [-0.707107, 0.707107], atol=1e-6)
    _, second = algorithm.transform.apply(state, batch.replace(reward=jnp.asarray([2.0, 6.0])))
    # Mean 3 and deviation sqrt(14/3) of 1, 3, 2 and 6; the second, 1.388730, is clipped.
    np.testing.assert_allclose(second.reward, [-0.462910, 0.8], atol=1e-6)
    np.testing.assert_allclose(second.advantages[:, 0], [-0.462910 + 0.05, 0.8 + 0.05], atol=1e-6)


def test_ppo_max_without_its_tricks_is_ppo() -> None:
    batch, logp, V = critic_batch()
    bare = ppo_max(reward_scaling="none", kl_coefficient=0.0)
    same = ppo(kl_coefficient=0.0, whiten=False)
    found, expected = (loss_of(a, batch, logp, values=jnp.asarray(V, jnp.float32)) for a in (bare, same))
    assert found == pytest.approx(expected, abs=1e-6)
    aimed = ppo_max(reward_scaling="none", kl_coefficient=0.0, entropy_weight=0.1, entropy_target=2.0)
    H = np.full(logp.shape, 1.5)
    assert loss_of(aimed, batch, logp, H, values=jnp.asarray(V, jnp.float32)) == pytest.approx(
        expected + 0.05, abs=1e-5
    )


def test_ppo_max_with_texts_is_ppo_max_without_them_and_their_likelihood() -> None:
    """The texts change neither advantages nor the means of policy and critic."""
    batch, logp, V = critic_batch()
    N = len(logp)
    texts = np.arange(N) % 4 == 3
    marked = batch.with_info(demonstrated=jnp.asarray(texts, jnp.float32)).replace(
        old_logp=jnp.asarray(logp, jnp.float32)
    )
    values = jnp.asarray(V, jnp.float32)
    found = ppo_max(pretraining_coefficient=0.3)
    ready = prepared(found, marked)
    plain = prepared(ppo_max(), batch.replace(reward=jnp.where(texts, jnp.nan, batch.reward)))
    np.testing.assert_allclose(ready.advantages, plain.advantages, atol=1e-6)
    assert not np.asarray(ready.advantages)[texts].any()
    assert found.rollout is not None
    assert found.rollout.columns == ("answer",)
    mask = np.asarray(batch.action_mask) & texts[:, None]
    likelihood = -np.asarray(logp)[mask].mean()
    sampled = batch.replace(reward=jnp.where(texts, jnp.nan, batch.reward))
    without = loss_of(ppo_max(), sampled, logp, values=values)
    assert loss_of(found, marked, logp, values=values) == pytest.approx(without + 0.3 * likelihood, abs=1e-5)
    none = marked.with_info(demonstrated=jnp.zeros(N))
    assert loss_of(found, none, logp, values=values) == pytest.approx(
        loss_of(ppo_max(), batch, logp, values=values), abs=1e-6
    )
    assert ppo_max().rollout is None


def test_vc_ppo_teaches_the_monte_carlo_return() -> None:
    values = np.array([[0.2, 0.3, 0.5, 0.4, 0.6]])
    batch = batch_of(np.ones((1, 5)), [1.0], np.zeros((1, 5)), values=values)
    ready = prepared(vc_ppo(whiten=False), batch)
    np.testing.assert_allclose(ready.advantages[0], [0.697027, 0.628450, 0.451, 0.58, 0.4], atol=1e-6)
    np.testing.assert_allclose(ready.returns[0], np.ones(5), atol=1e-6)
    coupled = prepared(vc_ppo(whiten=False, lam_critic=0.95), batch)
    np.testing.assert_allclose(coupled.returns[0], [0.897027, 0.928450, 0.951, 0.98, 1], atol=1e-6)
    adaptive = prepared(vapo(whiten=False, alpha=0.5), batch)
    np.testing.assert_allclose(adaptive.advantages[0], [0.279040, 0.2984, 0.164, 0.44, 0.4], atol=1e-6)
    short = prepared(vapo(whiten=False), batch)
    np.testing.assert_allclose(short.advantages, prepared(vc_ppo(whiten=False, lam=0.0), batch).advantages, atol=1e-6)


@pytest.mark.heavy
def test_vc_ppo_and_vapo_are_their_loops() -> None:
    rows_of = loop_rows(critic_batch()[0])

    def vc_loop(logp: Any, V: Any) -> float:
        rows = rows_of(logp=logp, V=V)
        for row in rows:
            credit(row, 1.0, 0.7, 1.0)
        whiten_loop(rows)
        return sum(losses(rows, 0.2, 0.2, 0.2))

    def vapo_loop(logp: Any, V: Any) -> float:
        rows = rows_of(logp=logp, V=V)
        for row in rows:
            credit(row, 1.0, min(max(1 - 1 / (0.4 * len(row.V)), 0), 1), 1.0)
        whiten_loop(rows)
        right = [x for row in rows if row.scored and row.score > 0.5 for x in row.logp]
        return sum(losses(rows, 0.2, 0.28, 0.2)) - 0.1 * sum(right) / len(right)

    check(vc_ppo(lam=0.7), vc_loop)
    check(vapo(alpha=0.4), vapo_loop)


def test_vc_ppo_with_one_lambda_is_ppo() -> None:
    batch, logp, V = critic_batch()
    V = jnp.asarray(V, jnp.float32)
    same = ppo(kl_coefficient=0.0, lam=0.9)
    assert loss_of(vc_ppo(lam=0.9, lam_critic=0.9), batch, logp, values=V) == loss_of(same, batch, logp, values=V)


def test_vapo_without_a_right_answer_has_no_imitation() -> None:
    batch, logp, V = critic_batch()
    wrong = batch.replace(reward=jnp.minimum(batch.reward, 0.3 + 0 * batch.reward))
    V = jnp.asarray(V, jnp.float32)
    found, expected = (loss_of(vapo(imitation_coefficient=c), wrong, logp, values=V) for c in (0.1, 0.0))
    assert found == expected


def two_heads(seed: int = 0) -> tuple[Trajectories, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed + 50)
    before = random.normal(size=(11, 6, 2)) * 0.5
    batch, logp = random_batch(seed, values=before)
    return batch.replace(reward=batch.reward.at[2].set(jnp.nan)), logp, before + 0.3 * random.normal(size=(11, 6, 2))


@pytest.mark.heavy
@pytest.mark.parametrize("penalty_gradient", [True, False])
def test_safe_is_its_loop(penalty_gradient: bool) -> None:
    batch, logp, V = two_heads()
    # Far from the reference, so that the penalty is active in the first batch: its moving average is a tenth of 7.
    batch = batch.replace(reference_logp=(batch.behaviour_logp - 7.0) * batch.action_mask)
    algorithm = safe_entropy_aware(penalty_gradient=penalty_gradient)
    rows_of = loop_rows(batch)
    old = rows_of()
    kl = np.mean([a - b for row in old for a, b in zip(row.old, row.reference, strict=True)])
    scored = ~np.isnan(np.asarray(batch.reward))[:, None]
    H = np.mean(np.asarray(batch.entropy, np.float64)[np.asarray(batch.action_mask) & scored])
    slope = 0.1 * max(0.5, 2 / (H + 0.1)) * 2 * (0.1 * kl - 0.45)
    penalty = 0.1 * (0.1 * kl - 0.45) ** 2 * max(0.5, 2 / (H + 0.1))

    def soft(v: Any) -> float:
        return -0.3 * (np.log(sum(np.exp(-x / 0.3) for x in v)) - np.log(2))

    def huber(x: float) -> float:
        return x * x / 2 if abs(x) <= 0.5 else 0.5 * (abs(x) - 0.25)

    def loop(logp: Any, V: Any, at: Any = logp) -> float:
        rows, policy, value, felt, count = rows_of(logp=logp, V=V, at_logp=at), 0.0, 0.0, 0.0, 0
        raw = {n: row.score - soft(row.V_old[-1]) for n, row in enumerate(rows) if row.scored}
        mean, deviation = np.mean(list(raw.values())), np.sqrt(np.var(list(raw.values()), ddof=1) + 1e-8)
        for n, row in enumerate(rows):
            A = (raw[n] - mean) / deviation if row.scored else 0.0
            for x, o, f, y in zip(row.logp, row.old, row.reference, row.at_logp, strict=True):
                rho, count = np.exp(x - o), count + 1
                policy += max(-A * rho, -A * min(max(rho, 0.8), 1.2))
                felt += ((x - f) ** 2 - (y - f) ** 2) / 2 if penalty_gradient else 0.0
            if row.scored:
                v, o = soft(row.V[-1]), soft(row.V_old[-1])
                value += 0.5 * (huber(v - row.score) + huber(o + min(max(v - o, -0.2), 0.2) - row.score))
        return policy / count + 0.5 * value / len(rows) + penalty + slope * felt / count

    new = jnp.asarray(V, jnp.float32)
    assert loss_of(algorithm, batch, logp, values=new) == pytest.approx(loop(logp, V), rel=2e-5)
    found, mask = gradient_of(algorithm, batch, logp, values=new), np.asarray(batch.action_mask)
    np.testing.assert_allclose(found, finite_differences(lambda x: loop(x, V), logp) * mask, atol=5e-6)
    ready = prepared(algorithm, batch)
    by_values = jax.grad(lambda v: algorithm.objective(outputs_of(logp, values=v), ready)[0])(new)
    np.testing.assert_allclose(by_values, finite_differences(lambda x: loop(logp, x), V) * mask[..., None], atol=2e-6)
    assert algorithm.needs == {"reference_logp", "values:2"}


def test_needs_and_bad_input() -> None:
    assert ppo().needs == {"values", "reference_logp"}
    assert vapo().needs == vc_ppo().needs == ppo(kl_coefficient=0.0).needs == {"values"}
    batch, logp, _ = critic_batch()
    with pytest.raises(InputError, match="critic"):
        loss_of(vapo(), batch, logp)
    with pytest.raises(InputError, match="values"):
        prepared(vapo(), batch.replace(values=None))
    with pytest.raises(InputError, match="kl_in"):
        ppo(kl_in="both")


def test_the_parts_of_ppo_are_the_general_ones() -> None:
    batch, logp, V = critic_batch()
    algorithm = ppo(kl_coefficient=0.0, value_coefficient=0.0)
    ready = prepared(algorithm, batch)
    expected, _ = policy_gradient(token_ratio(), clip(), token_mean())(outputs_of(logp), ready)
    found, _ = algorithm.objective(outputs_of(logp, values=V.astype(np.float32)), ready)
    assert float(found) == pytest.approx(float(expected), abs=1e-7)
