"""Objectives other than the mean: worked examples, loops over all sets in double precision, and gradients."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import (
    MASK,
    OLD,
    advantages,
    batch_of,
    finite_differences,
    gradient_of,
    loss_of,
    near,
    prepared,
    random_batch,
)  # fmt: skip
from plain_losses import averaged, clipped_loss, on_tokens

from jaxrl_llm.advantages.risk import CREDITS
from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.classic.rloo import rloo
from jaxrl_llm.algorithms.score_function.maxrl import maxrl
from jaxrl_llm.algorithms.score_function.passk_grpo import passk_grpo
from jaxrl_llm.algorithms.score_function.polychromic import polychromic
from jaxrl_llm.algorithms.score_function.riskpo import riskpo
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.transform import stateless
from jaxrl_llm.utils.errors import InputError

pytestmark = pytest.mark.heavy

BATCH, NEAR = random_batch(0)
MASKS = np.asarray(BATCH.action_mask)
R, GROUP = np.asarray(BATCH.reward, np.float64), np.asarray(BATCH.group)
BEHAVIOUR = np.asarray(BATCH.behaviour_logp, np.float64)
N = len(R)
GRADED = np.round(np.random.default_rng(5).random(N), 1)
GRADED_BATCH = BATCH.replace(reward=jnp.asarray(GRADED, jnp.float32))


def check(algorithm: Algorithm, A: Any, average: str, batch: Any = BATCH, extra: Any = lambda x: 0.0) -> None:
    """Row advantages [N] of the loop, in the clipped loss; and its gradient."""
    near(advantages(algorithm, batch), on_tokens(A, MASKS), 1e-5)

    def loss(x: np.ndarray) -> float:
        return clipped_loss(on_tokens(A, MASKS), x, BEHAVIOUR, MASKS, 0.2, 0.2, average) + extra(x)

    assert loss_of(algorithm, batch, NEAR) == pytest.approx(loss(NEAR), rel=1e-5, abs=1e-5)
    near(gradient_of(algorithm, batch, NEAR), finite_differences(loss, NEAR), 1e-5)


def row_of(reward: Any) -> Any:
    n = len(reward)
    return batch_of(np.ones((n, 1)), np.asarray(reward, float), -np.ones((n, 1)))


def members(i: int) -> list[int]:
    return [j for j in range(N) if GROUP[j] == GROUP[i]]


def of_sets(f: Any, k: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """E_i, E and the deviation of f over all sets of min(k, n - 1)."""
    inside, mean, deviation = np.zeros(N), np.zeros(N), np.zeros(N)
    for i in range(N):
        sets = list(combinations(members(i), min(k, len(members(i)) - 1)))
        inside[i] = np.mean([f(s) for s in sets if i in s])
        mean[i], deviation[i] = np.mean([f(s) for s in sets]), np.std([f(s) for s in sets])
    return inside, mean, deviation


def test_maxrl_worked_example() -> None:
    near(advantages(maxrl(), batch_of())[:, 0], 0.999998 * np.array([1, -1, -1, 1]))
    eight = row_of([1, 0, 0, 0, 0, 0, 0, 0])
    near(advantages(maxrl(), eight)[:, 0], [6.999944] + [-0.999992] * 7)
    for same in (0.0, 1.0):
        assert (advantages(maxrl(), eight.replace(reward=jnp.full(8, same))) == 0).all()


def test_the_expectation_of_maxrl_is_that_of_one_term_less() -> None:
    """Over all outcomes of N = 4 samples: sum A S / N, with the score of a success 1/p and of a failure -1/(1-p)."""
    p, total = 0.1, 0.0
    for K in range(5):
        chance = [1, 4, 6, 4, 1][K] * p**K * (1 - p) ** (4 - K)
        A = advantages(maxrl(epsilon=0.0), row_of([1.0] * K + [0.0] * (4 - K)))[:, 0]
        total += chance * (A[:K].sum() / p - A[K:].sum() / (1 - p)) / 4
    assert total == pytest.approx((1 - 0.9**3) / 0.1, rel=1e-5)


def test_maxrl_is_the_loop() -> None:
    A = np.array([(R[i] - R[members(i)].mean()) / (R[members(i)].mean() + 1e-6) for i in range(N)])
    check(maxrl(), A, "token")
    check(maxrl(average="sum"), A, "sum")


def test_passk_worked_example() -> None:
    margin = advantages(passk_grpo(estimator="margin"), row_of([0.9, 0.5, 0.2, 0.4]))[:, 0]
    near(margin, [1.358728, 0, 0, 0])
    for correct, right, wrong in ((2, 0.522232, -0.174077), (1, 0.999998, -0.142857), (5, 0.0, 0.0)):
        A = advantages(passk_grpo(k=4), row_of([1] * correct + [0] * (8 - correct)))[:, 0]
        near(A, [right] * correct + [wrong] * (8 - correct))


@pytest.mark.parametrize("k", [2, 4])
def test_passk_is_the_loop_over_all_sets(k: int) -> None:
    inside, mean, deviation = of_sets(lambda s: max(GRADED[list(s)]), k)
    A = np.where(deviation > 1e-9, (inside - mean) / (deviation + 1e-6), 0.0)
    check(passk_grpo(k), A, "token", GRADED_BATCH)
    unbiased = np.zeros(N)
    for i in range(N):
        size = min(k, len(members(i)) - 1)
        without = [max(GRADED[list(s)]) for s in combinations([j for j in members(i) if j != i], size)]
        unbiased[i] = size * (inside[i] - np.mean(without))
    near(advantages(passk_grpo(k, "unbiased"), GRADED_BATCH), on_tokens(unbiased, MASKS), 1e-5)


def test_pass_at_one_is_grpo_or_rloo() -> None:
    near(advantages(passk_grpo(1), BATCH), advantages(grpo(ddof=0), BATCH))
    near(advantages(passk_grpo(1, "unbiased"), BATCH), advantages(rloo(0.0), BATCH))
    plain = gradient_of(grpo(kl_coefficient=0.0, ddof=0), BATCH, BEHAVIOUR)
    near(gradient_of(passk_grpo(1, average="sequence"), BATCH, BEHAVIOUR), plain)


def test_margin_is_the_loop() -> None:
    A = np.zeros(N)
    for i in range(N):
        best, second = sorted(GRADED[members(i)], reverse=True)[:2]
        A[i] = (best - second) * (GRADED[i] == best)
    near(advantages(passk_grpo(estimator="margin", scale="none"), GRADED_BATCH), on_tokens(A, MASKS))


@pytest.mark.parametrize("diversity", ["share", "share_or_zero", "zero_based"])
def test_polychromic_is_the_loop_over_all_sets(diversity: str) -> None:
    keys = np.random.default_rng(3).integers(0, 3, N)
    batch = GRADED_BATCH.with_info(answer_key=jnp.asarray(keys))

    def f(s: tuple[int, ...]) -> float:
        distinct, n = len(set(keys[list(s)])), len(s)
        share = 0.0 if distinct == 1 and diversity == "share_or_zero" else distinct / n
        return GRADED[list(s)].mean() * ((distinct - 1) / max(n - 1, 1) if diversity == "zero_based" else share)

    size = 2  # some sets agree, others do not
    assert {len(set(keys[list(s)])) for g in range(3) for s in combinations(np.flatnonzero(g == GROUP), size)} == {1, 2}
    inside, mean, _ = of_sets(f, size)

    def penalty(x: np.ndarray) -> float:
        return 0.3 * averaged(1 + (x - BEHAVIOUR) - np.exp(x - BEHAVIOUR), MASKS, "token")

    check(polychromic(size, diversity, kl_coefficient=0.3), inside - mean, "token", batch, penalty)
    inside, mean, _ = of_sets(f, 3)
    near(advantages(polychromic(3, diversity), batch), on_tokens(inside - mean, MASKS), 1e-5)


def test_polychromic_vines_are_the_loop_over_sets_of_a_state() -> None:
    """A group of an episode, three vines from each of two states, and a sample that could not be one."""
    random = np.random.default_rng(4)
    states, length = np.array([0, 1, 2, 1, 2, 1, 2, 0]), 6
    mask = np.arange(length) < random.integers(4, length + 1, 8)[:, None]
    scores, keys = np.round(random.random(8), 1), random.integers(0, 3, 8)
    place = np.arange(length)
    vine = np.where(place < states[:, None], -1.0, np.where(place < states[:, None] + 2, states[:, None], 0.0))
    vine *= (states > 0)[:, None]  # a state's number is also the turn where its vines begin, and their window is 2
    values = random.normal(size=mask.shape)
    batch = batch_of(mask, scores, -np.ones(mask.shape), np.zeros(8), values=values * mask)
    batch = batch.with_info(vine=jnp.asarray(vine, jnp.float32), answer_key=jnp.asarray(keys))
    ready = prepared(polychromic(2, states=2, gamma=0.9, lam=0.5), batch)
    expected = np.zeros(mask.shape)
    for i in range(8):
        last = int(mask[i].sum()) - 1
        for t in range(last, -1, -1):  # GAE
            after = 0.9 * values[i, t + 1] if t < last else scores[i]
            expected[i, t] = after - values[i, t] + (0.45 * expected[i, t + 1] if t < last else 0.0)
    for state in (1, 2):
        members = np.flatnonzero(states == state)
        sets = list(combinations(members, 2))
        f = {s: scores[list(s)].mean() * len(set(keys[list(s)])) / 2 for s in sets}
        for i in members:
            own = np.mean([f[s] for s in sets if i in s]) - np.mean(list(f.values()))
            expected[i, vine[i] == state] = own
    kept = mask & (vine >= 0)
    near(np.where(kept, ready.advantages, 0.0), np.where(kept, expected, 0.0), 1e-5)
    assert (np.asarray(ready.loss_weights) != 0).tolist() == kept.tolist()
    assert not kept[1, 0]
    assert kept[0].sum() == mask[0].sum()


def test_polychromic_without_keys_tells_completions_apart_by_their_tokens() -> None:
    """All differ, so diversity is 1 and the advantage that of the mean reward over the sets."""
    inside, mean, _ = of_sets(lambda s: R[list(s)].mean(), 2)
    near(advantages(polychromic(2), BATCH), on_tokens(inside - mean, MASKS), 1e-5)


def risk_batch(seed: int = 0) -> Any:
    """Four groups of one response, in bundles of two: one draw each, so that nothing is random."""
    random = np.random.default_rng(seed)
    mask = np.arange(4) < random.integers(1, 5, 4)[:, None]
    return batch_of(mask, [1.0, 0.5, 0.0, 0.25], -random.random((4, 4)) * mask, range(4))


def test_riskpo_tracks_quantiles_from_batch_to_batch() -> None:
    algorithm = riskpo(bundle_size=2, credit="uniform")
    batch, levels, apply = risk_batch(), 0.05 * np.arange(1, 20), jax.jit(algorithm.transform.apply)
    X = np.array([1.5, 0.25])
    q = np.quantile(X, levels)
    state, first = apply(algorithm.transform.init(), batch)
    second = batch.replace(reward=jnp.asarray([0.5, 0.0, 1.0, 1.0]))
    for found, x in ((first, X), (None, np.array([0.5, 2.0]))):
        if found is None:
            state, found = apply(state, second)
        a, b = q[3], q[15]
        g_R = (np.maximum(x - a, 0) - np.maximum(x - b, 0)) / 0.6
        A = (1.5 * -np.maximum(a - x, 0) / 0.2 + g_R) / 2.5
        near(found.advantages[:, 0], np.repeat(A, 2), 2e-5)
    near(state[1], q + 0.1 * (levels - np.array([(np.array([0.5, 2.0]) < value).mean() for value in q])))


def test_riskpo_is_the_loop() -> None:
    """Responses to the second question of each bundle have equal rewards, so the random assignment to draws only
    permutes them."""
    reward = np.array([1.0, 0, 0.5, 0.25] + [0.75] * 4 + [0.0, 0.5, 1, 1])
    group, n = np.repeat([0, 1, 2], 4), 12
    mask = np.arange(3) < np.random.default_rng(0).integers(1, 4, n)[:, None]
    batch = batch_of(mask, reward, -np.random.default_rng(1).random((n, 3)) * mask, group)
    built = {
        credit: riskpo(bundle_size=2, quantiles="batch", credit=credit, natural_baseline=True) for credit in CREDITS
    }
    found = jax.jit(lambda b: {credit: prepared(algorithm, b).advantages for credit, algorithm in built.items()})(batch)
    for credit in CREDITS:
        A = np.zeros(n)
        for questions in ([0, 1], [2]):
            rows = np.array([np.nonzero(group == g)[0] for g in questions])
            X = reward[rows].sum(0)
            a, b = np.quantile(X, 0.2), np.quantile(X, 0.8)
            g_R = (np.maximum(X - a, 0) - np.maximum(X - b, 0) + a - b) / (0.6 + 1e-6)
            paper = (1.5 * -np.maximum(a - X, 0) / (0.2 + 1e-6) + g_R) / 2.5 / (X.std(ddof=1) + 1e-6)
            d = reward[rows] - reward[rows].mean(1, keepdims=True)
            for q, j in np.ndindex(rows.shape):
                r, deviation = reward[rows[q, j]], reward[rows[q]].std(ddof=1)
                total = d[:, j].sum()
                A[rows[q, j]] = (
                    paper[j]
                    * {
                        "uniform": 1.0,
                        "std": 1 / (deviation + 1e-6) if deviation > 1e-3 else 1.0,
                        "score": 0.5 if r > 0 else 1.5,
                        "sum_mean": d[q, j] / total if abs(total) > 1e-6 else 1 / len(rows),
                    }[credit]
                )
        of_rows = np.asarray(found[credit])[:, 0]
        near(np.sort(of_rows[4:8]), np.sort(A[4:8]), 2e-5)
        A[4:8] = of_rows[4:8]
        near(found[credit], on_tokens(A, mask), 2e-5)
    algorithm, ready = built["score"], batch.replace(advantages=found["score"])
    old, A = np.asarray(batch.behaviour_logp, float), np.asarray(found["score"])
    now = old + 0.15 * np.random.default_rng(2).normal(size=old.shape) * mask

    def loss(x: np.ndarray) -> float:
        return clipped_loss(A, x, old, mask, 0.2, 0.2, "token")

    given = Algorithm(stateless(lambda _: ready), algorithm.objective)
    assert loss_of(given, batch, now) == pytest.approx(loss(now), rel=1e-5, abs=1e-5)
    near(gradient_of(given, batch, now), finite_differences(loss, now), 1e-5)


def test_riskpo_takes_the_bundles_that_are_given_and_has_no_credit_where_scores_are_equal() -> None:
    batch = risk_batch().with_info(bundle=jnp.array([7, 3, 7, 3]))
    compiled = jax.jit(lambda b: prepared(riskpo(credit="uniform"), b).need("advantages")[:, 0])
    found = compiled(batch)
    assert found[0] == found[2] != found[1] == found[3]
    equal = batch.replace(reward=jnp.full(4, 0.5, jnp.float32))
    assert (compiled(equal) == 0).all()


def test_bad_choices_are_refused() -> None:
    for build in (
        lambda: passk_grpo(estimator="best"),
        lambda: polychromic(diversity="none"),
        lambda: riskpo(credit="none"),
        lambda: riskpo(quantiles="all"),
        lambda: maxrl(average="none"),
    ):
        with pytest.raises(InputError):
            advantages(build(), BATCH)
    assert prepared(maxrl(), batch_of(MASK, [0.0, 0, 0, 0], OLD)).advantages is not None
