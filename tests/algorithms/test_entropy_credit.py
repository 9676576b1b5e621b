"""Methods of entropy credit against their worked examples and slow loops."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, finite_differences, gradient_of, loss_of, outputs_of, prepared, random_batch
from token_loops import agrees, clipped_loss, doubles, group_scores

from jaxrl_llm.algorithms.agents.aepo_agentic import aepo_agentic
from jaxrl_llm.algorithms.credit.erpo_entropy_regulated import erpo_entropy_regulated
from jaxrl_llm.algorithms.credit.hapo_heterogeneous import (
    entropy_level,
    hapo_heterogeneous,
    length_weighted_advantage,
    level_temperature,
    log_entropy_scale,
)
from jaxrl_llm.algorithms.regularisation.aepo_arbitrary_entropy import aepo_arbitrary_entropy
from jaxrl_llm.algorithms.regularisation.dcpo_distribution_centric import dcpo_distribution_centric, mixture_share
from jaxrl_llm.utils.errors import InputError

pytestmark = pytest.mark.heavy

close = np.testing.assert_allclose
FULL = np.ones((2, 4), bool)


def feedback(entropy: float) -> dict[str, Any]:
    return {"updates": jnp.float32(1), "entropy": jnp.float32(entropy)}


def sigmoid(x: float) -> float:
    return 1 / (1 + np.exp(-x))


def test_the_worked_example_of_dcpo() -> None:
    alpha = mixture_share(jnp.array(0.25 - 0.15), 0.1, jnp.array(0.5))
    close(alpha, 0.166667, atol=1e-6)
    logits = np.array([2.0, 1, 0])
    logp, tempered = (x - np.log(np.exp(x).sum()) for x in (logits, logits / 1.2))
    # Four rows of one token, half of them right, so that GRPO's advantages are +-0.866025.
    logp, tempered = np.array([[logp[k]] for k in (0, 2, 0, 1)]), np.array([[tempered[k]] for k in (0, 2, 0, 1)])
    info = {"tempered_logp:1.2": tempered, "tempered_logp:0.8": np.full((4, 1), 5.0)}
    fields = {"reward": [1.0, 1, 0, 0], "behaviour": logp, "info": info, "feedback": feedback(0.15)}
    A = prepared(dcpo_distribution_centric(), batch_of(np.ones((4, 1)), **fields)).advantages[:, 0]
    w = np.array([0.925925, 1.292232, 0, 0])
    close(A, 0.833333 * 0.866024 * np.array([1, 1, -1, -1]) + 0.166667 * w, atol=2e-6)
    # All rewards are equal: the group's advantage is 0, and the third token's A is that of the worked example.
    share = mixture_share(jnp.array(0.1), 0.1, jnp.array(0.5))
    close([5 / 6 + share * 0.925925, share * 1.292232], [0.987654, 0.215372], atol=2e-6)


@pytest.mark.parametrize("entropy", [0.1, 0.3])
def test_dcpo_against_a_loop(entropy: float) -> None:
    batch, logp = random_batch(0, feedback=feedback(entropy))
    noise = np.random.default_rng(1).normal(size=logp.shape)
    old = doubles(batch.behaviour_logp)
    batch = batch.with_info(
        **{f"tempered_logp:{T}": jnp.float32(old + k * noise) for T, k in (("1.2", 0.1), ("0.8", -0.2))}
    )
    reward, k = doubles(batch.reward), 0.1 if entropy <= 0.25 else -0.2
    alpha = min(abs(0.25 - entropy), 0.1) / np.mean(reward > 0.05)
    alpha /= 1 + alpha
    A = (1 - alpha) * group_scores(reward, batch.group)[:, None] + alpha * (reward > 0.05)[:, None] * np.exp(k * noise)
    agrees(dcpo_distribution_centric(), batch, logp, A, dual=3.0)


def test_dcpo_without_a_right_sample_or_a_gap_is_grpo() -> None:
    batch, _ = random_batch(0, feedback=feedback(0.25))
    info = {f"tempered_logp:{T}": batch.behaviour_logp - 1 for T in ("1.2", "0.8")}
    A = group_scores(batch.reward, batch.group)[:, None] * np.asarray(batch.action_mask)
    close(prepared(dcpo_distribution_centric(), batch.with_info(**info)).advantages, A, atol=1e-5)
    wrong = batch.replace(reward=batch.reward - 2, feedback=feedback(0.0)).with_info(**info)
    close(prepared(dcpo_distribution_centric(), wrong).advantages, A, atol=1e-5)
    with pytest.raises(InputError, match="plain number"):
        dcpo_distribution_centric(hot=jnp.float32(1.2))  # type: ignore[arg-type]


def test_arbitrary_entropy_swaps_rows_for_right_tempered_ones() -> None:
    tempered = np.array([0, 0, 1, 1, 0, 0, 1, 1, 0, 0, 1], bool)
    reward = np.array([1.0, 0, 1, 0, 1, 1, 1, 0, 0, 1, 1])
    batch, logp = random_batch(2, info={"tempered": tempered}, feedback=feedback(0.4))
    batch = batch.replace(reward=jnp.float32(reward))
    algorithm = aepo_arbitrary_entropy()
    ready = prepared(algorithm, batch)
    assert float(ready.controls["temperature"]) == pytest.approx(1.2)
    kept = np.asarray(ready.loss_weights).any(axis=1)
    # Rows 2 and 6 are right in mixed tempered groups; row 10 has a group of its own.
    np.testing.assert_array_equal(np.flatnonzero(kept & tempered), [2, 6])
    assert (kept & ~tempered).sum() == (~tempered).sum() - 2
    A = np.where(tempered, 1.0, group_scores(np.where(tempered, np.nan, reward), batch.group))
    A = np.broadcast_to(A[:, None], logp.shape)
    agrees(algorithm, batch, logp, A, weights=kept[:, None], old=batch.old_logp, dual=3.0)
    far = np.asarray(batch.old_logp) + 1.5 * np.random.default_rng(0).normal(size=logp.shape)  # where 3 bounds some
    agrees(algorithm, batch, far, A, weights=kept[:, None], old=batch.old_logp, dual=3.0)
    high = prepared(algorithm, batch.replace(feedback=feedback(0.6)))
    assert float(high.controls["temperature"]) == pytest.approx(0.8)
    assert np.asarray(high.loss_weights).any(axis=1).sum() == 6
    one = prepared(aepo_arbitrary_entropy(most=1), batch)
    assert (np.asarray(one.loss_weights).any(axis=1) & tempered).sum() == 1


def test_arbitrary_entropy_without_tempered_rows_is_grpo() -> None:
    batch, logp = random_batch(3)
    A = np.broadcast_to(group_scores(batch.reward, batch.group)[:, None], logp.shape)
    agrees(aepo_arbitrary_entropy(dual_clip=None), batch, logp, A, old=batch.old_logp)


def test_the_worked_example_of_agentic_aepo() -> None:
    # r = [1, 0] has A = [1, -1] by the population; here the group is weighed by its sample deviation.
    batch = batch_of(np.ones((2, 2)), [1.0, 0], np.zeros((2, 2)), entropy=np.array([[0.5, 1.5], [1, 1]]))
    A = prepared(aepo_agentic(strength=0.3), batch).advantages * np.sqrt(2)
    close(A, [[0.575736, 1.424264], [-1, -1]], atol=5e-6)
    A = prepared(aepo_agentic(preset="code"), batch).advantages * np.sqrt(2)
    close(A, [[0.755051, 1.244949], [-1, -1]], atol=5e-6)
    rho, A, F = np.array([[1.5, 0.5, 1.1, 1.5]]), np.array([[1.0, -1, 1, -1]]), [1.28, 0, 1.1, 1.5]
    rows = batch_of(np.ones((1, 4)), [1.0], np.zeros((1, 4))).replace(advantages=jnp.float32(A))
    objective = aepo_agentic().objective

    def loss(logp: Any) -> Any:
        return objective.function(outputs_of(logp), rows)[0]

    close(jax.grad(loss)(jnp.float32(np.log(rho)))[0], -np.array(F) * A[0] / 4, rtol=1e-5)


def test_agentic_aepo_against_a_loop() -> None:
    batch, logp = random_batch(4)
    mask, H, group = np.asarray(batch.action_mask), doubles(batch.entropy), np.asarray(batch.group)
    logp = logp + 0.3 * np.random.default_rng(0).normal(size=logp.shape)
    scores, A = group_scores(batch.reward, group), np.zeros(logp.shape)
    for i, t in np.argwhere(mask):
        values = [H[j, s] for j, s in np.argwhere(mask) if group[j] == group[i]]
        A[i, t] = scores[i] * (1 + 0.2 * (H[i, t] - np.mean(values)) / np.std(values))
    algorithm, old = aepo_agentic(), doubles(batch.behaviour_logp)
    close(prepared(algorithm, batch).advantages, A, atol=1e-5)
    assert loss_of(algorithm, batch, logp) == pytest.approx(clipped_loss(logp, old, A, mask, high=0.28), abs=1e-5)
    gradient = np.zeros(logp.shape)
    for i, t in np.argwhere(mask):
        rho = np.exp(logp[i, t] - old[i, t])
        F = 1.28 if rho > 1.28 and A[i, t] > 0 else 0 if rho < 0.8 and A[i, t] < 0 else rho
        gradient[i, t] = -F * A[i, t] / mask.sum()
    close(gradient_of(algorithm, batch, logp), gradient, atol=2e-6)


def test_the_worked_example_of_erpo() -> None:
    H = np.array([[0.2, 1.5, 0.3, 0.1], [0.4, 0.2, 2, 0.1]])
    difference = np.array([[0.1, 0.5, 0, 0.05], [-0.05, 0.1, -0.3, 0]])
    batch = batch_of(FULL, [1.0, 0], np.full((2, 4), -1.0), entropy=H, reference_logp=-1 - difference)
    A = np.asarray(prepared(erpo_entropy_regulated(buckets=2), batch).advantages)
    expected = np.array([[0.996906, 1.330025, 1.008997, 1.004047], [-0.960990, -0.996906, -0.657378, -1.002248]])
    # The worked example has |A| = 1; the sample standard deviation of [1, 0] makes it 0.707106.
    close(A, expected + np.array([[-1.0], [1.0]]) * (1 - 0.5**0.5), atol=2e-5)


@pytest.mark.parametrize("compose", ["additive", "multiplicative"])
def test_erpo_against_a_loop(compose: str) -> None:
    batch, logp = random_batch(5)
    mask, H, group = np.asarray(batch.action_mask), doubles(batch.entropy), np.asarray(batch.group)
    T = mask.sum(axis=1)
    s = 0.1 * (doubles(batch.behaviour_logp) - doubles(batch.reference_logp))
    scores, W, signal = group_scores(batch.reward, group), np.zeros(logp.shape), np.zeros(logp.shape)
    places = np.argwhere(mask)
    for i, t in places:
        near = [(j, u) for j, u in places if group[j] == group[i]]
        values = [H[j, u] for j, u in near]
        W[i, t] = sigmoid(5 * (H[i, t] - np.mean(values)) / (np.std(values) + 1e-8))
        same = [s[j, u] for j, u in near if min(3 * u // T[j], 2) == min(3 * t // T[i], 2)]
        signal[i, t] = (s[i, t] - np.mean(same)) / (np.std(same) + 1e-8) if len(same) > 1 else 0
    A = scores[:, None] * np.ones(logp.shape)
    sign = np.sign(A)
    if compose == "additive":
        A = A + 0.2 * W * sign * signal
    else:
        A = A * T[:, None] * W / W.sum(axis=1, keepdims=True) + 0.2 * sign * signal
    agrees(erpo_entropy_regulated(buckets=3, compose=compose), batch, logp, A)


def test_the_worked_example_of_hapo() -> None:
    H = jnp.array([[0.01, 0.05, 0.2, 0.8, 1.6]])
    scale = log_entropy_scale(H, H > 0)
    h = entropy_level(H, scale)
    close(scale[:2], [np.log(0.8), 2.4204], atol=1e-5)
    close(h[0], [-1, -0.632718, -0.316359, 0, 1], atol=1e-5)
    close(level_temperature(h)[0], [0.95, 0.968364, 0.984182, 1, 1.05], atol=1e-5)
    rho = np.array([[1, 0.7, 1.05, 1.5, 1.15]])
    batch = batch_of(np.ones((1, 5)), [1.0], np.zeros((1, 5)), entropy=H)
    method = hapo_heterogeneous(dynamic_sampling=False)
    ready = prepared(method, batch).replace(advantages=jnp.ones((1, 5)))
    assert float(method.objective(outputs_of(np.log(rho)), ready)[0]) == pytest.approx(-0.753565, abs=1e-5)
    r, lengths = jnp.array([1.0, 0, 0]), jnp.array([4.0, 2, 2])
    close(length_weighted_advantage(r, lengths, jnp.zeros(3, jnp.int32)), [0.999998, -0.999998, -0.999998], atol=1e-6)


@pytest.mark.parametrize("uniform", [False, True])
def test_hapo_against_a_loop(uniform: bool) -> None:
    batch, logp = random_batch(6)
    if uniform:  # a group of equal rewards, with the extreme entropies: it counts nowhere
        extremes = jnp.where(jnp.arange(6) % 2, 40.0, 1e-6) * batch.action_mask
        same = batch.group == 1
        batch = batch.replace(
            reward=jnp.where(same, 1.0, batch.reward), entropy=jnp.where(same[:, None], extremes, batch.entropy)
        )
    mask, H, group = np.asarray(batch.action_mask), doubles(batch.entropy), np.asarray(batch.group)
    logp = logp + 0.1 * np.random.default_rng(3).normal(size=logp.shape)
    reward, T, old = doubles(batch.reward), mask.sum(axis=1), doubles(batch.behaviour_logp)
    if uniform:
        mask = mask & (group != 1)[:, None]
    x = np.log(np.maximum(H, 1e-8))
    q = sorted(x[mask])[round(0.8 * (mask.sum() - 1))]
    z = (x - q) / np.sqrt(np.mean((x[mask] - q) ** 2))
    h = np.where(z > 0, z / z[mask].max(), z / -z[mask].min())
    scores = np.zeros(len(reward))
    for g in set(group[mask.any(axis=1)].tolist()):
        rows = [i for i in range(len(reward)) if group[i] == g]
        tokens = [reward[i] for i in rows for _ in range(T[i])]
        for i in rows:
            scores[i] = (reward[i] - np.mean(tokens)) / (np.std(tokens) + 1e-6)
    assert np.abs(scores).max() < 5
    low, high = 0.2 * (1 - np.minimum(h, 0)), 0.2 * (1 + np.maximum(h, 0))

    def loop(logp: Any) -> float:
        total = 0.0
        for i, t in np.argwhere(mask):
            rho, A = np.exp(logp[i, t] - old[i, t]), scores[i]
            # The zone is under stop-gradient: it is that of the point at which we differentiate.
            inside = 1 - low[i, t] / 2 < zone[i, t] < 1 + high[i, t] / 2
            if (h[i, t] > 0) != inside:
                A *= 1 + h[i, t]
            value = min(rho * A, min(max(rho, 1 - low[i, t]), 1 + high[i, t]) * A)
            total += max(value, 10 * A) if A < 0 else value
        return -total / mask.sum()

    zone = np.exp(logp - old)
    algorithm = hapo_heterogeneous()
    assert algorithm.curriculum is not None
    assert algorithm.curriculum.rounds == 16
    np.testing.assert_array_equal(algorithm.curriculum.informative(batch), mask.any(axis=1))
    assert loss_of(algorithm, batch, logp) == pytest.approx(loop(logp), abs=1e-5)
    close(gradient_of(algorithm, batch, logp), finite_differences(loop, logp), atol=2e-5)


def test_an_extreme_group_of_hapo_gets_the_usual_advantage() -> None:
    r, lengths = jnp.array([1.0, 0, 0]), jnp.array([1.0, 40, 40])
    A = length_weighted_advantage(r, lengths, jnp.zeros(3, jnp.int32))
    close(A, group_scores(r, [0, 0, 0]), atol=1e-5)


def test_equal_entropies_change_nothing() -> None:
    batch, logp = random_batch(7)
    batch = batch.replace(entropy=0.7 * batch.action_mask)
    A = np.broadcast_to(group_scores(batch.reward, batch.group)[:, None], logp.shape)
    close(prepared(aepo_agentic(), batch).advantages, A * np.asarray(batch.action_mask), atol=1e-5)
    assert not np.asarray(prepared(hapo_heterogeneous(), batch).info["entropy_level"]).any()
