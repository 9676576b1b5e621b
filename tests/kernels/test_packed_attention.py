"""`packed_attention` against a loop over the tokens that each query sees, in float64, and what it compiles to."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import packed_trees
import pytest
from heavy import few
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.test_util import check_grads
from jaxrl_kernels import packed_attention
from jaxrl_kernels.packed_attention import PackedTokens, block_pairs
from jaxrl_kernels.packed_attention.blocks import attends, block_sizes
from packed_trees import L, causal, drawn, packings, row_of, size_of

compare = partial(packed_trees.compare, ("pallas", "xla"))


@pytest.mark.heavy
@settings(max_examples=12, deadline=None)
@given(packings(), st.sampled_from([0, 1, 20]), st.integers(0, 9))
def test_trees_windows_and_empty_rows_in_float64(tokens: PackedTokens, window: int, seed: int) -> None:
    with jax.enable_x64(True):
        compare(drawn(seed, 4, 2, 16), tokens, tokens, 1e-12, window=window)


@pytest.mark.parametrize("H, K, h, softcap", few(
    [(2, 2, 128, 2.0), (6, 2, 64, 0.0), (2, 1, 256, 5.0), (8, 1, 128, 0.0)], [(2, 2, 128, 2.0)], unpack=True
))  # fmt: skip
def test_heads_and_soft_caps(H: int, K: int, h: int, softcap: float) -> None:
    """Heads side by side in memory, and first; many query heads for a key; a sliding window in a row of its own."""
    tokens = PackedTokens(*np.stack([row_of([[90, [30], [44, [20], [5]]]], [3], L), row_of([[200]], [0], L)], axis=1))
    with jax.enable_x64(True):
        compare(drawn(1, H, K, h), tokens, tokens, 1e-12, softcap, 50)


@pytest.mark.heavy
@pytest.mark.parametrize("dtype, tolerance", [(jnp.float32, 1e-5), (jnp.bfloat16, 3e-2)])
def test_short_numbers(dtype: Any, tolerance: float) -> None:
    tokens = causal([200, 256], L)
    arrays = drawn(2, 4, 2, 16, dtype=dtype)
    compare(arrays, tokens, tokens, tolerance)


@pytest.mark.heavy
@pytest.mark.parametrize("queries, keys", [(128, 1024), (200, 77), (1, 300), (640, 640)])
def test_other_queries_than_keys_and_lengths_that_are_padded(queries: int, keys: int) -> None:
    """Queries that continue the keys, as with a cache; several chunks of a block of keys."""
    whole = causal([keys + queries, keys + queries - 5], keys + queries)

    def cut(part: slice) -> PackedTokens:
        return PackedTokens(*(x[:, part] for x in whole))

    with jax.enable_x64(True):
        compare(drawn(3, 4, 2, 16, queries, keys), cut(slice(keys, None)), cut(slice(keys)), 1e-12, window=90)


@pytest.mark.heavy
def test_gradients_by_finite_differences() -> None:
    tokens = PackedTokens(*(row_of([[9, [5], [7]]], [2], 24)[:, None]))
    with jax.enable_x64(True):
        random = np.random.default_rng(4)
        arrays = [jnp.asarray(random.normal(size=(1, 24, heads, 8))) for heads in (2, 1, 1)]
        attend = partial(packed_attention, queries=tokens, softcap=3.0, window=6, implementation="pallas")
        check_grads(lambda *x: jax.tree.map(jnp.tanh, attend(*x)), arrays, order=1, modes=["rev"], rtol=1e-6)


@pytest.mark.heavy
def test_sets_of_keys_combine_by_their_log_sum_exps() -> None:
    """As over the devices of a sequence axis: results weighted by exp(lse) are the result for all keys."""
    tokens = causal([256, 190], L)
    halves = [PackedTokens(*(x[:, part] for x in tokens)) for part in (slice(128), slice(128, None))]
    with jax.enable_x64(True):
        q, k, v = drawn(5, 4, 2, 16)
        whole, lse = packed_attention(q, k, v, tokens, implementation="pallas")
        parts = [
            packed_attention(q, k[:, place], v[:, place], tokens, keys, implementation="pallas")
            for keys, place in zip(halves, (slice(128), slice(128, None)), strict=True)
        ]
        weights = [jnp.exp(part - lse).swapaxes(1, 2)[..., None] for _, part in parts]
        merged = sum(weight * out for weight, (out, _) in zip(weights, parts, strict=True))
        real = (tokens.enter > 0)[..., None, None]
        np.testing.assert_allclose(jnp.where(real, merged, 0), jnp.where(real, whole, 0), atol=1e-13)


def needed(tokens: PackedTokens) -> tuple[int, int]:
    """Blocks of 128 x 128 that a kernel computes, and those of which some query attends to some key."""
    pairs = block_pairs(tokens, tokens)
    size, width = block_sizes(tokens.enter.shape[1], tokens.enter.shape[1])
    assert size == 128
    computed = 0
    for pair in np.asarray(pairs.by_query[0])[: int(pairs.counts[0, 0])]:
        query, key = pair >> 16, pair & 0xFFFF
        for group in range(key * width // 128, (key + 1) * width // 128):
            computed += bool(attends(tuple(pairs.of_queries[0, :, query]), tuple(pairs.of_keys[0, :, group]), 0))
    number = tokens.enter[0, :, None]
    sees = (tokens.enter[0][None] <= number) & (number < tokens.leave[0][None])
    blocks = sees.shape[0] // 128
    return computed, int(sees.reshape(blocks, 128, blocks, 128).any((1, 3)).sum())


@pytest.mark.heavy
@pytest.mark.parametrize("trees, gaps", [
    ([[512, *[[512]] * 4]], [0]),  # a prompt and its completions
    ([[300, *[[200, [120], [150]]] * 3], [400, [77]]], [0, 130]),  # trees, not on the borders of blocks
    ([[130]] * 12, [0] * 12),  # short sequences side by side
])  # fmt: skip
def test_blocks_that_nobody_sees_are_skipped(trees: list[Any], gaps: list[int]) -> None:
    total = sum(map(size_of, trees)) + sum(gaps)
    computed, seen = needed(PackedTokens(*row_of(trees, gaps, -(-total // 128) * 128)[:, None]))
    assert seen <= computed <= 1.1 * seen


def test_many_tokens_take_larger_blocks() -> None:
    assert block_sizes(4096, 4096) == (128, 512)
    assert block_sizes(640, 640) == (128, 128)
    assert block_sizes(133_120, 133_120) == (256, 1024)
    with pytest.raises(ValueError, match="too many for one kernel: use a longer sequence axis"):
        block_sizes(2**20, 2**20)


@pytest.mark.heavy
def test_many_models_at_once() -> None:
    """vmap over queries, as over seeds of a run, with the same tokens."""
    tokens = causal([100, 128], 128)
    q, k, v = drawn(6, 2, 1, 16, 128, 128, jnp.float32)
    many = jax.vmap(lambda q: packed_attention(q, k, v, tokens)[0])(jnp.stack([q, 2 * q]))
    np.testing.assert_allclose(many[1], packed_attention(2 * q, k, v, tokens)[0], atol=1e-6)


GOOD: dict[str, Any] = {
    "q": jnp.ones((2, 8, 4, 16)), "k": jnp.ones((2, 8, 2, 16)), "v": jnp.ones((2, 8, 2, 16)),
    "queries": PackedTokens(*causal([8, 8], 8)),
}  # fmt: skip


@pytest.mark.parametrize("change, message", [
    ({"q": jnp.ones((2, 8, 16))}, r"q must be floating \[N, L, H, h\], found float32\[2, 8, 16\]"),
    ({"k": jnp.ones((2, 8, 3, 16))}, r"k must be float32\[2, S, K, 16\], where K divides 4, found"),
    ({"v": jnp.ones((2, 8, 2, 16), jnp.bfloat16)}, r"v must be float32\[2, 8, 2, 16\], as k is, found bfloat16"),
    ({"queries": PackedTokens(*causal([8, 8], 9))}, r"queries.enter must be int32\[2, 8\], found int32\[2, 9\]"),
    ({"keys": PackedTokens(*causal([8], 8))}, r"keys.enter must be int32\[2, 8\], found int32\[1, 8\]"),
    ({"window": -1}, "window must be 0 .* found -1"),
    ({"softcap": -1.0}, "softcap must be 0 .* found -1"),
    ({"implementation": "triton"}, "unknown implementation 'triton'"),
    ({"row_axis": "tensor"}, "mesh axis 'tensor' cannot shard both"),
])  # fmt: skip
def test_errors_say_what_was_found(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        packed_attention(**GOOD | change)
