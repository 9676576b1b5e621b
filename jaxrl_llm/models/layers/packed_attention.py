"""Attention by the kernel `packed_attention`, which TPUs and GPUs take; on CPUs dense masks are as fast.

The kernel sees all tokens of a shard as one sequence: who attends to whom depends on the tokens' numbers alone, which
are unique in a packing, and blocks in which no token attends to another are skipped, whatever rows they belong to.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxrl_kernels import packed_attention
from jaxrl_kernels.decode_attention import PartialAttention
from jaxrl_kernels.packed_attention import BlockPairs, PackedTokens, block_pairs

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.attention import Attend, Weighing
from jaxrl_llm.models.layers.sink_slots import Slots, merge_slots
from jaxrl_llm.models.mesh_axes import ROWS, SEQUENCE, TENSOR, AnyMesh, takes_kernels

EVERYTHING = 2**30  # more than any token's number
LANES = 128  # lengths of rows are multiples of it where the kernel takes them


def lanes(mesh: AnyMesh | None) -> int:
    """The multiple of which lengths of packed rows should be one: other lengths would be padded, by copies."""
    return LANES if takes_kernels(mesh) else 1


def by_kernel(
    config: ModelConfig, tokens: PackedTokens, attended: int, mesh: AnyMesh | None, rows: tuple[str, ...] = ROWS
) -> Attend:
    """Attention of all packed tokens, int32[N, T] each, for `decoder.run`.

    attended: how many pairs of tokens attend to each other in each of the N sequences at most, for the estimated cost.
    mesh: None for that of the arrays. rows: axes of the mesh over which the sequences are sharded.
    """
    windows = sorted(set(config.window_of_layer))
    padded = PackedTokens(*(jnp.pad(x, [(0, 0), (0, -x.shape[1] % LANES)]) for x in tokens))
    pairs = [block_pairs(padded, padded, window) for window in windows]

    def of_window(window: Any) -> BlockPairs:
        if isinstance(window, int):
            return pairs[windows.index(window)]
        if len(windows) == 1:
            return pairs[0]
        place = jnp.searchsorted(jnp.asarray(windows, jnp.int32), window)
        return jax.tree.map(lambda *each: jnp.stack(each)[place], *pairs)

    heads = tuple(axis for axis in (TENSOR, SEQUENCE) if axis not in rows)

    def attend(q: Array, k: Array, v: Array, memory: Any, how: Weighing) -> tuple[Array, None]:
        # The pairs of blocks are of padded lengths, as the kernel makes them; without padding they serve as they are.
        known = of_window(how.window) if q.shape[1] % LANES == 0 else None
        size = v.shape[3]
        with jax.named_scope("attention"):
            if size < q.shape[3]:
                v = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, q.shape[3] - size)))
            out, lse = packed_attention(
                q, k, v, tokens, pairs=known, query_scale=how.scale, softcap=how.softcap, window=how.window,
                attended=attended, mesh=mesh, row_axis=rows, head_axis=heads,
            )  # fmt: skip
            if how.slots is not None:
                out, lse = _with_slots(q, out, lse, how.slots, how)
            if how.sinks is not None:  # of the weights' sum, tokens have the share sigmoid(lse - sink)
                share = jax.nn.sigmoid(lse - how.sinks.astype(lse.dtype)[:, None]).swapaxes(1, 2)[..., None]
                out = out * share.astype(out.dtype)
        return out[..., :size], None

    return attend


def _with_slots(q: Array, out: Array, lse: Array, slots: Slots, how: Weighing) -> tuple[Array, Array]:
    """Results of attention [N, T, H, h], and the logarithm [N, H, T] of the sum of their weights, with slots."""
    N, T, H, _ = q.shape
    K = slots.keys.shape[0]

    def grouped(x: Array) -> Array:
        return x.reshape(N, T, K, H // K, -1).swapaxes(1, 2)

    m = grouped(lse.swapaxes(1, 2))[..., 0]
    part = PartialAttention(grouped(out).astype(m.dtype), m, jnp.ones_like(m))
    both = merge_slots(part, grouped(q), slots, how.scale, how.softcap)
    lse = (both.m + jnp.log(both.l)).swapaxes(1, 2).reshape(N, T, H).swapaxes(1, 2)
    return (both.acc / both.l[..., None]).swapaxes(1, 2).reshape(N, T, H, -1).astype(out.dtype), lse


def causal_tokens(length: Array, width: int) -> PackedTokens:
    """Rows of `width` places that begin with `length` (int32[N]) tokens each, which attend to those before them."""
    place = jnp.arange(width, dtype=jnp.int32)
    real = (place < length[:, None]).astype(jnp.int32)
    return PackedTokens((place + 1) * real, EVERYTHING * real, place * real)
