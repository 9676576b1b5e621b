"""The kernels of `packed_attention` for GPUs, interpreted: as the walk in float64. And what is lowered for CUDA."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import packed_trees
import pytest
from heavy import few
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxrl_kernels import implementations, packed_attention
from jaxrl_kernels.packed_attention import PackedTokens, block_pairs
from packed_trees import L, by_triton, causal, drawn, packings, row_of, size_of

from jaxrl_llm.plan.program.cost import matrix_flops

TARGET = "__gpu$xla.gpu.triton"
compare = partial(packed_trees.compare, ("triton",))


@pytest.mark.heavy
@settings(max_examples=8, deadline=None)
@given(packings(), st.sampled_from([0, 1, 20]), st.integers(0, 9))
def test_trees_windows_and_empty_rows_in_float64(tokens: PackedTokens, window: int, seed: int) -> None:
    with jax.enable_x64(True):
        compare(drawn(seed, 4, 2, 16), tokens, tokens, 1e-12, window=window)


@pytest.mark.heavy
@pytest.mark.parametrize("H, K, h, softcap", few(
    [(6, 2, 80, 2.0), (2, 1, 64, 0.0), (2, 2, 96, 0.0), (8, 1, 128, 0.0), (2, 1, 256, 5.0)], [(6, 2, 80, 2.0)],
    unpack=True,
))  # fmt: skip
def test_heads_and_soft_caps(H: int, K: int, h: int, softcap: float) -> None:
    """Heads that are powers of two and others, many query heads for a key, a sliding window in a row of its own."""
    tokens = PackedTokens(*np.stack([row_of([[90, [30], [44, [20], [5]]]], [3], L), row_of([[200]], [0], L)], axis=1))
    with jax.enable_x64(True):
        compare(drawn(1, H, K, h), tokens, tokens, 1e-12, softcap, 50)


@pytest.mark.heavy
@pytest.mark.parametrize("h, dtype, tolerance", few(
    [(64, jnp.float32, 1e-5), (128, jnp.float32, 1e-5), (256, jnp.float32, 1e-5), (64, jnp.bfloat16, 3e-2),
     (128, jnp.bfloat16, 3e-2), (256, jnp.bfloat16, 3e-2)], [(64, jnp.float32, 1e-5), (128, jnp.bfloat16, 3e-2)],
    unpack=True,
))  # fmt: skip
def test_short_numbers(h: int, dtype: Any, tolerance: float) -> None:
    """Every size of blocks that GPUs use."""
    tokens = causal([200, 256], L)
    compare(drawn(2, 2, 1, h, dtype=dtype), tokens, tokens, tolerance)


def test_other_queries_than_keys() -> None:
    """Queries that continue the keys, as with a cache."""
    whole = causal([512, 500], 512)

    def cut(part: slice) -> PackedTokens:
        return PackedTokens(*(x[:, part] for x in whole))

    with jax.enable_x64(True):
        compare(drawn(3, 2, 2, 16, 128, 384), cut(slice(384, None)), cut(slice(384)), 1e-12, window=90)


@pytest.mark.parametrize("trees, gaps", [
    ([[512, *[[512]] * 4]], [0]),  # a prompt and its completions
    ([[300, *[[200, [120], [150]]] * 3], [400, [77]]], [0, 130]),  # trees, not on the borders of blocks
    ([[130]] * 12, [0] * 12),  # short sequences side by side
])  # fmt: skip
def test_blocks_that_nobody_sees_are_skipped(trees: list[Any], gaps: list[int]) -> None:
    length = -(-(sum(map(size_of, trees)) + sum(gaps)) // 128) * 128
    tokens = PackedTokens(*row_of(trees, gaps, length)[:, None])
    visits = jax.tree.map(np.asarray, block_pairs(tokens, tokens).visits)
    number, blocks = tokens.enter[0, :, None], length // 128
    sees = (tokens.enter[0][None] <= number) & (number < tokens.leave[0][None])
    seen = sees.reshape(blocks, 128, blocks, 128).any((1, 3))
    of_keys, of_queries = (visits.keys, visits.key_counts), (visits.queries, visits.query_counts)
    for (listed, counts), wanted in ((of_keys, seen), (of_queries, seen.T)):
        assert counts.sum() <= 1.1 * seen.sum()
        for block in range(blocks):
            found = listed[0, block, : counts[0, block]]
            assert (np.diff(found) > 0).all()
            assert set(np.flatnonzero(wanted[block])) <= set(found.tolist())


def lowered(
    shape: tuple[int, int, int], dtype: Any = jnp.bfloat16, implementation: str | None = None, platform: str = "cuda",
    length: int = 256, **options: Any,
) -> str:  # fmt: skip
    """The program for results and gradients. shape: H, K, h."""
    H, K, h = shape
    q, k = (jax.ShapeDtypeStruct((2, length, heads, h), dtype) for heads in (H, K))
    tokens = PackedTokens(*[jax.ShapeDtypeStruct((2, length), jnp.int32)] * 3)

    def both(q: Any, k: Any, v: Any, tokens: Any) -> Any:
        attend = partial(packed_attention, queries=tokens, implementation=implementation, **options)
        results, pull = jax.vjp(attend, q, k, v)
        return results, pull(results)

    return jax.jit(both).trace(q, k, k, tokens).lower(lowering_platforms=(platform,)).as_text()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("h", few([64, 80, 128, 256], [80]))
def test_lowers_for_cuda(h: int, dtype: Any) -> None:
    """Three kernels: the forward pass, dq, and dk with dv. Lengths that are no multiples of 128 are padded."""
    text = lowered((4, 2, h), dtype, "pallas", length=200 if h == 80 else 256, softcap=30.0, window=90)
    assert text.count(TARGET) == 3
    assert "tpu_custom_call" not in text


def test_is_the_default_on_cuda_alone() -> None:
    assert lowered((4, 2, 64)).count(TARGET) == 3
    assert TARGET not in lowered((4, 2, 64), implementation="xla")
    assert TARGET not in lowered((4, 2, 64), platform="cpu")
    text = lowered((4, 2, 64), platform="tpu")
    assert TARGET not in text
    assert text.count("tpu_custom_call") == 3


def test_heads_too_large_for_shared_memory_take_xla() -> None:
    assert TARGET not in lowered((2, 1, 512))


def device(capability: str | None, platform: str = "gpu") -> Any:
    found = SimpleNamespace(platform=platform)
    return found if capability is None else SimpleNamespace(platform=platform, compute_capability=capability)


def test_gpus_before_ampere_take_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    takes = implementations.takes_triton
    assert [takes(device(x)) for x in ("7.5", "8.0", "9.0", "12.0", "gfx90a")] == [False, True, True, True, False]
    assert not takes(device(None, "cpu"))
    assert not takes(device(None, "tpu"))
    for capability, kernels in (("7.5", 0), ("9.0", 3)):
        here = [device(capability)]
        monkeypatch.setattr(jax, "local_devices", lambda here=here, **_: here)
        assert lowered((2, 1, 64)).count(TARGET) == kernels


def test_many_models_at_once() -> None:
    """vmap over queries, as over seeds of a run, with the same tokens; and its program for CUDA."""
    tokens, arrays = causal([100], 128), drawn(6, 2, 1, 16, 128, 128, jnp.float32)
    q, k, v = (x[:1] for x in arrays)

    def attend(q: Any) -> Any:
        return by_triton(q, k, v, tokens, tokens, query_scale=1.0, softcap=0.0, window=jnp.int32(0))[0]

    many = jax.jit(jax.vmap(attend))
    two = jnp.stack([q, 2 * q])
    np.testing.assert_allclose(many(two)[1], attend(2 * q), atol=1e-6)
    assert TARGET in many.trace(two).lower(lowering_platforms=("cuda",)).as_text()


def test_declares_its_products() -> None:
    """Nine products for each pair of tokens that attends: two forward, three for dq and four for dk and dv."""
    q, k = (jnp.ones((1, 256, heads, 64), jnp.bfloat16) for heads in (4, 2))
    tokens = causal([256], 256)

    def loss(q: Any, k: Any, v: Any) -> Any:
        out, _ = packed_attention(q, k, v, tokens, attended=256 * 257 // 2)
        return jnp.sum(out.astype(jnp.float32))

    jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(q, k, k)
    assert matrix_flops(jaxpr, "cuda") == matrix_flops(jaxpr, "tpu") == 9 * 2 * 4 * 64 * 256 * 257 // 2
