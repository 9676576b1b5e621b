"""Effective rank and its growth along a response."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.needs.computed import effective_rank, growth, prefix_ranks, rank_measures

close = np.testing.assert_allclose
Z = np.array([[1, 0, 0], [0.9, 0.1, 0], [0, 1, 0], [0, 0.8, 0.2], [0, 0, 1], [0.1, 0, 0.9]])


def loop_rank(rows: np.ndarray) -> float:
    if len(rows) < 2:
        return 0.0
    s = np.linalg.svd(rows - rows.mean(axis=0), compute_uv=False)
    if s.sum() < 1e-12:
        return 1.0
    p = s / s.sum()
    return float(np.exp(-sum(x * np.log(x) for x in p if x > 1e-15)))


def test_the_worked_example() -> None:
    series, known = prefix_ranks(jnp.float32(Z), jnp.int32(6), 1)
    close(series, [1, 1, 1.454503, 1.988699, 1.999229], atol=2e-5)
    close(growth(series, known), [0.482532, 0.212809], atol=2e-5)
    close(rank_measures(jnp.float32(Z), jnp.ones(6, bool), 1), [1.999229, 0.482532, 0.212809], atol=2e-5)


def test_edges() -> None:
    ones = jnp.ones(6, bool)
    assert float(effective_rank(jnp.full((6, 3), 0.3), ones)) == 1
    assert float(effective_rank(jnp.float32(Z), jnp.arange(6) == 2)) == 0
    close(rank_measures(jnp.float32(Z), ones & False, 1), np.zeros(3))
    # Fewer rows than twice the stride: no growth.
    close(rank_measures(jnp.float32(Z), ones, 3)[1:], np.zeros(2))


def test_masked_rows_and_long_vectors_against_a_loop() -> None:
    """More dimensions than rows, unmasked rows in between, a window of the last rows, and a batch of several."""
    random = np.random.default_rng(0)
    hidden, mask = random.normal(size=(2, 12, 20)) * random.uniform(0.1, 2, (12, 1)), random.random((2, 12)) < 0.75
    found = jax.jit(jax.vmap(lambda h, m: rank_measures(h, m, 2, 7)))(
        jnp.float32(np.where(mask[..., None], hidden, np.nan)), mask
    )
    for n in range(2):
        rows = hidden[n][mask[n]]
        window = rows[-7:]
        m = [loop_rank(window[: t + 1]) for t in range(2, len(window), 2)]
        change = [m[j] - np.mean(m[:j]) for j in range(1, len(m))]
        turn = np.diff(change)
        close(found[n], [loop_rank(rows), np.mean(change), np.mean(turn)], rtol=2e-4, atol=2e-4)
