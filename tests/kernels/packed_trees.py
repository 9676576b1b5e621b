"""Packed rows of trees, and attention among their tokens by a walk, for tests of `packed_attention`."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jaxrl_kernels import packed_attention
from jaxrl_kernels.packed_attention import MASKED, Numbers, PackedTokens, Static, Where, attend, block_pairs

L = 256  # two blocks of queries


def row_of(trees: list[list[Any]], gaps: list[int], length: int) -> np.ndarray:
    """int32[3, length]: trees side by side, each a number of tokens and its subtrees, after gaps."""
    out, at, number = np.zeros((3, length), np.int32), 0, 1

    def put(tree: list[Any], depth: int) -> None:
        nonlocal at, number
        count, *below = tree
        first, place = number, at
        at, number = at + count, number + count
        for each in below:
            put(each, depth + count)
        # An interval ends where the subtree does.
        out[:, place : place + count] = first + np.arange(count), np.full(count, number), depth + np.arange(count)

    for tree, gap in zip(trees, gaps, strict=True):
        at += gap
        put(tree, 0)
    return out


def size_of(tree: list[Any]) -> int:
    return tree[0] + sum(map(size_of, tree[1:]))


counts = st.integers(1, 40)
trees = st.recursive(counts.map(lambda n: [n]), lambda below: st.tuples(counts, st.lists(below, max_size=3)).map(
    lambda made: [made[0], *made[1]]
), max_leaves=5)  # fmt: skip


@st.composite
def packings(draw: Any) -> PackedTokens:
    """Two rows of trees; a row may be empty, and begin or end with gaps."""
    rows = []
    for _ in range(2):
        chosen, gaps, used = [], [], 0
        for tree, gap in draw(st.lists(st.tuples(trees, st.integers(0, 30)), max_size=5)):
            if used + size_of(tree) + gap <= L:
                chosen.append(tree)
                gaps.append(gap)
                used += size_of(tree) + gap
        rows.append(row_of(chosen, gaps, L))
    return PackedTokens(*np.stack(rows, axis=1))


def causal(lengths: list[int], length: int) -> PackedTokens:
    return PackedTokens(*np.stack([row_of([[n]] if n else [], [0] * bool(n), length) for n in lengths], axis=1))


def drawn(seed: int, H: int, K: int, h: int, queries: int = L, keys: int = L, dtype: Any = jnp.float64) -> list[Any]:
    random = np.random.default_rng(seed)
    return [
        jnp.asarray(random.normal(size=(2, n, heads, h)), dtype) for n, heads in ((queries, H), (keys, K), (keys, K))
    ]


def expected(
    q: Any, k: Any, v: Any, queries: PackedTokens, keys: PackedTokens, softcap: float, window: int
) -> tuple[np.ndarray, np.ndarray]:
    """By a walk over the tokens, one query at a time."""
    q, k, v = (np.asarray(x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, np.float64) for x in (q, k, v))
    N, T, H, h = q.shape
    out, lse = np.zeros(q.shape), np.full((N, H, T), MASKED)
    for n in range(N):
        for i in range(T):
            sees = [
                j for j in range(k.shape[1])
                if keys.enter[n, j] <= queries.enter[n, i] < keys.leave[n, j]
                and (not window or queries.position[n, i] - keys.position[n, j] < window)
            ]  # fmt: skip
            if sees:
                for head in range(H):
                    of = head // (H // k.shape[2])
                    z = k[n, sees, of] @ q[n, i, head] * h**-0.5
                    z = softcap * np.tanh(z / softcap) if softcap else z
                    weights = np.exp(z - z.max())
                    out[n, i, head] = weights @ v[n, sees, of] / weights.sum()
                    lse[n, head, i] = z.max() + np.log(weights.sum())
    return out, lse


def by_triton(
    q: Any, k: Any, v: Any, queries: Any, keys: Any, *, query_scale: float, softcap: float, window: Any
) -> Any:
    """The kernels for CUDA; elsewhere in interpret mode. Lengths are multiples of 128."""
    static = Static(Numbers(query_scale, softcap), None, "triton")
    return attend(static, q, k, v, Where(queries, keys, block_pairs(queries, keys, window), window))


@partial(jax.jit, static_argnames=("softcap", "implementation"))
def run(q: Any, k: Any, v: Any, queries: Any, keys: Any, window: Any, softcap: float, implementation: str) -> Any:
    """Results, and gradients of random sums of both."""

    def loss(q: Any, k: Any, v: Any) -> Any:
        in_public = partial(packed_attention, implementation=implementation)
        attention = by_triton if implementation == "triton" else in_public
        out, lse = attention(q, k, v, queries, keys, query_scale=q.shape[-1] ** -0.5, softcap=softcap, window=window)
        w = jnp.cos(jnp.arange(out.size).reshape(out.shape) * 0.7)
        u = jnp.sin(jnp.arange(lse.size).reshape(lse.shape) * 0.3)
        return jnp.sum(out * w) + jnp.sum(jnp.where(lse > MASKED / 2, lse, 0) * u), (out, lse)

    gradients, found = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    return found, gradients


def compare(
    names: Iterable[str], arrays: list[Any], queries: Any, keys: Any, tolerance: float, softcap: float = 0.0,
    window: int = 0,
) -> None:  # fmt: skip
    """Compare implementations with the walk, and their gradients with those of the reference."""
    truth = expected(*arrays, queries, keys, softcap, window)
    ways = {way: run(*arrays, queries, keys, jnp.int32(window), softcap, way) for way in (*names, "reference")}
    for way, (found, gradients) in ways.items():
        for x, y in zip(found, truth, strict=True):
            np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance, err_msg=way)
        for x, y in zip(gradients, ways["reference"][1], strict=True):
            np.testing.assert_allclose(x, y, rtol=10 * tolerance, atol=10 * tolerance, err_msg=f"gradient, {way}")
