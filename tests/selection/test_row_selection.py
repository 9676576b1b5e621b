"""Selections of rows and tokens against brute force and worked examples."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.judged.brpo import against_reference
from jaxrl_llm.algorithms.preferences.pf_ppo import key_noise, rank_weights, score_weights
from jaxrl_llm.selection.rows import (
    late_tokens,
    max_variance_subset,
    ranks_within,
    resampled_counts,
    share_down,
    share_up,
    top_tokens,
)

close = np.testing.assert_allclose
ONE = jnp.zeros(5, jnp.int32)


def test_ranks_are_within_keys_and_put_invalid_rows_last() -> None:
    keys, values = jnp.array([7, 2, 7, 2, 7]), jnp.array([1.0, 5, 3, jnp.nan, 1])
    ranks = ranks_within(keys, values, jnp.array([0.5, 0, 0, 0, 0.1]), ~jnp.isnan(values))
    np.testing.assert_array_equal(ranks, [2, 0, 0, 1, 1])


def test_the_subset_of_greatest_variance_is_that_of_brute_force() -> None:
    find = jax.jit(max_variance_subset)
    for seed in range(6):
        values = np.random.default_rng(seed).normal(size=8)
        valid = np.arange(8) != seed
        for keep in (1, 3, 6):
            found = np.asarray(find(jnp.float32(np.where(valid, values, np.nan)), valid, keep, jnp.zeros(8)))
            assert found.sum() == keep
            assert valid[found].all()
            best = max(np.var(values[list(S)]) for S in itertools.combinations(np.flatnonzero(valid), keep))
            assert np.var(values[found]) == pytest.approx(best, abs=1e-6)
        assert find(jnp.float32(values), valid, 20, jnp.zeros(8)).sum() == 7


@pytest.mark.heavy
def test_weights_of_ranks_and_scores() -> None:
    rewards = jnp.array([0.1, 0.9, -0.5, 0.4, 0.2])
    rank = ranks_within(ONE, rewards, rewards, ONE == 0)
    np.testing.assert_array_equal(rank + 1, [4, 1, 5, 2, 3])
    close(rank_weights(rank, 5.0 + 0 * rewards, "best_random"), [0.125, 0.5, 0.125, 0.125, 0.125])
    close(rank_weights(rank, 5.0 + 0 * rewards, "best_worst"), [0, 0.5, 0.5, 0, 0])
    close(rank_weights(rank, 5.0 + 0 * rewards, "best"), [0, 1, 0, 0, 0])
    for scheme in ("best_random", "best_worst", "best", "uniform"):
        assert float(rank_weights(jnp.array([0]), jnp.array([1.0]), scheme)[0]) == 1
    scores = jnp.array([0.1, -0.5, 0.9, 0.2])
    expected = [0.009009, 0.225225, 0.729730, 0.036036]
    close(score_weights(scores, scores < 2, "power"), expected, atol=1e-6)
    close(score_weights(scores, scores < 2, "max_min"), [0, 0.5, 0.5, 0], atol=1e-6)
    close(score_weights(scores, scores < 2, "max_random"), np.array([1, 1, 4, 1]) / 7, atol=1e-6)
    close(score_weights(0 * scores, scores < 2, "power"), np.full(4, 0.25))


@pytest.mark.heavy
def test_resampling_gives_each_row_its_share() -> None:
    weights, keys = jnp.array([0.5, 0.3, 0.2, 3.0, 1.0, 0.0]), jnp.array([1, 1, 1, 4, 4, 9])
    order = jnp.array([0.3, 0.1, 0.7, 0.2, 0.4, 0.9])
    u = (jnp.arange(1000) + 0.5) / 1000
    draw = jax.vmap(lambda u: resampled_counts(weights, keys, 3.0, jnp.full(6, u), order))
    counts = np.asarray(draw(u))
    np.testing.assert_array_equal(counts[:, :3].sum(axis=1), np.full(1000, 3))
    np.testing.assert_array_equal(counts[:, 3:5].sum(axis=1), np.full(1000, 3))
    assert not counts[:, 5].any()
    close(counts.mean(axis=0), [1.5, 0.9, 0.6, 2.25, 0.75, 0], atol=2e-3)
    noise = key_noise(jnp.array([0.5, 0.75, 0.125, 0.3]), jnp.array([1, 1, 1, 2]), jnp.array([True, True, False, True]))
    close(noise, [0.25, 0.25, 0.25, 0.3], atol=1e-6)


def test_verdicts_against_a_reference() -> None:
    """A worked example: the third is the reference; wins, win, loss; other groups have no reference, or no score."""
    score = jnp.array([0.9, 0.8, 0.5, 0.1, 0.7, jnp.nan])
    reference = jnp.array([False, False, True, False, False, False])
    A = against_reference(score, jnp.array([0, 0, 0, 0, 1, 0]), reference)
    np.testing.assert_array_equal(A, [1, 1, 0, -1, 0, 0])


def test_the_best_tokens_whatever_the_padding() -> None:
    H, A = jnp.array([[0.1, 1.2, 0.4], [2.0, 0.3, 0.6]]), jnp.array([[1.5], [0.5]])
    score, ties = A * H, jnp.zeros((2, 3))
    close(score, [[0.15, 1.8, 0.6], [1.0, 0.15, 0.3]])
    np.testing.assert_array_equal(top_tokens(score, score > 0, 0.5, ties, "batch"), [[0, 1, 1], [1, 0, 0]])
    np.testing.assert_array_equal(top_tokens(score, score > 0, 0.5, ties, "row"), [[0, 1, 1], [1, 0, 1]])
    # Equal scores, padding with more: only what is masked in counts.
    equal = jnp.array([[9.0, 1, 1, 1, 9.0]])
    mask = equal < 9
    kept = top_tokens(equal, mask, 0.5, jnp.array([[0, 0.3, 0.1, 0.2, 0]]), "batch")
    np.testing.assert_array_equal(kept, [[0, 0, 1, 1, 0]])
    assert not top_tokens(equal, mask & False, 0.5, equal, "row").any()
    np.testing.assert_array_equal(late_tokens(jnp.array([[-1, 0, 1, -1, 2]]), jnp.array([3.0]), 0.9), [[0, 0, 0, 0, 1]])


def test_shares_do_not_suffer_from_rounding() -> None:
    n = jnp.arange(1, 20001).astype(jnp.float32)
    for hundredths in (1, 10, 33, 50, 70, 99):
        exact = np.arange(1, 20001) * hundredths
        np.testing.assert_array_equal(share_down(n, jnp.float32(hundredths / 100)), exact // 100)
        np.testing.assert_array_equal(share_up(n, 1 - jnp.float32(1 - hundredths / 100)), -(-exact // 100))
