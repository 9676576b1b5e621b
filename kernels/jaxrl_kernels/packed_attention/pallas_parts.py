"""Shared parts of the Pallas kernels for TPU (Mosaic): what a step of the grid reads, and logits of blocks.

Everything is transposed, with tokens along the lanes: queries, keys, values and results are [N, heads x h, tokens], in
which XLA for TPUs gives them where heads are normalised or rotated, and logits are [keys, R x queries] for the R query
heads of a key-value head. What belongs to a query, such as its running maximum, is a row. No head size needs padding.

Grids are (N, K, pairs of blocks). The last size is a number on the device: only pairs that are needed take a step.
"""

from collections.abc import Callable
from functools import partial, reduce
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_kernels.packed_attention.blocks import LANES, SHIFT, BlockPairs, PackedTokens, attends
from jaxrl_kernels.packed_attention.reference import MASKED, Sizes, accumulation_dtype

Array = jax.Array

CHUNK = 512  # keys whose logits are computed at a time, at most
RESIDENT_BYTES = 32 * 2**20  # of the keys and values of a head, double-buffered, that stay in VMEM over its queries
MIB = 2**20
NN, NT, TN = (((1,), (0,)), ((), ())), (((1,), (1,)), ((), ())), (((0,), (0,)), ((), ()))


class Scalars(NamedTuple):
    """What the kernels find in scalar memory."""

    pairs: Any  # int32[N x P]
    counts: Any  # int32[N]
    of_queries: Any  # int32[N x 3 x blocks of queries]
    of_keys: Any  # int32[N x 3 x keys / 128]
    window: Any  # int32[1]


def scalars_of(pairs: BlockPairs, by_key: bool, window: Array) -> Scalars:
    """The scalars of a kernel that goes through the pairs by query, or by key."""
    chosen, count = pairs.by_key if by_key else pairs.by_query, pairs.counts[:, int(by_key)]
    bounds = pairs.of_queries.reshape(-1), pairs.of_keys.reshape(-1)
    return Scalars(chosen.reshape(-1), count, *bounds, window.reshape(1).astype(jnp.int32))


def tokens_last(x: Array) -> Array:
    """[N, T, heads, h] -> [N, heads x h, T]."""
    return x.reshape(*x.shape[:2], -1).swapaxes(1, 2)


def tokens_first(x: Array, of: Sizes) -> Array:
    """The inverse of `tokens_last`."""
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1, of.h)


def packed_marks(tokens: PackedTokens) -> Array:
    """int32[N, 8, T]: enter, leave and position, each along the lanes, and rows of zeros."""
    marks = jnp.stack([x.astype(jnp.int32) for x in tokens], axis=1)
    return jnp.pad(marks, [(0, 0), (0, 8 - marks.shape[1]), (0, 0)])


class Step(NamedTuple):
    """A step of the grid."""

    query: Any  # number of the block of queries
    key: Any  # of the block of keys
    first: Any  # whether it is the first step of its block of queries, or of keys
    last: Any
    live: Any  # whether there is a pair of blocks left
    row: Any  # n


def step_of(scalars: Scalars, of: Sizes, by_key: bool) -> Step:
    """The step that this call of the kernel takes."""
    row, place = pl.program_id(0), pl.program_id(2)
    pair = scalars.pairs[row * of.pairs + place]
    before = scalars.pairs[row * of.pairs + jnp.maximum(place - 1, 0)]
    after = scalars.pairs[row * of.pairs + jnp.minimum(place + 1, of.pairs - 1)]
    block = (lambda x: x & (2**SHIFT - 1)) if by_key else (lambda x: x >> SHIFT)
    last = (place + 1 >= scalars.counts[row]) | (block(after) != block(pair))
    first = (place == 0) | (block(before) != block(pair))
    live = place < scalars.counts[row]
    return Step(pair >> SHIFT, pair & (2**SHIFT - 1), first & live, last & live, live, row)


def for_each_chunk(scalars: Scalars, of: Sizes, step: Step, compute: Callable[[Any, int], None]) -> None:
    """Call compute(first key in the block, number of keys) for the parts of a pair of blocks that attend.

    A chunk of which every 128 keys are needed is computed at once; else only those 128 that are.
    """
    queries = tuple(scalars.of_queries[(step.row * 3 + i) * (of.L // of.size) + step.query] for i in range(3))
    window, groups = scalars.window[0], of.S // LANES

    def needed(group: Any) -> Any:
        return attends(queries, tuple(scalars.of_keys[(step.row * 3 + i) * groups + group] for i in range(3)), window)

    chunk = max(c for c in range(LANES, min(of.width, CHUNK) + 1, LANES) if of.width % c == 0)
    for start in range(0, of.width, chunk):
        first = step.key * (of.width // LANES) + start // LANES
        every = reduce(lambda a, b: a & b, [needed(first + i) for i in range(chunk // LANES)], step.live)
        pl.when(every)(partial(compute, start, chunk))
        if chunk > LANES:
            pl.when(step.live & ~every)(partial(_for_each_group, needed, compute, first, start, chunk))


def _for_each_group(needed: Callable[[Any], Any], compute: Callable[[Any, int], None], first: Any, start: int,
                    chunk: int) -> None:  # fmt: skip
    """Call `compute` for those 128 keys of a chunk that are needed, one after another."""

    @pl.loop(0, chunk // LANES)
    def _(group: Any) -> None:
        pl.when(needed(first + group))(partial(compute, pl.multiple_of(start + group * LANES, LANES), LANES))


def keys_at(step: Step, of: Sizes, start: Any, count: int, whole: bool) -> Any:
    """Where keys that begin at `start` in a block of keys are, in all keys of a head or in the block alone."""
    return pl.ds(pl.multiple_of(step.key * of.width + start, LANES), count) if whole else pl.ds(start, count)


def beside(x: Array, of: Sizes) -> Array:
    """A block [R x h, size] with its heads side by side, [h, R x size]."""
    return x if of.R == 1 else jnp.concatenate([x[r * of.h : (r + 1) * of.h] for r in range(of.R)], axis=1)


def below(x: Array, of: Sizes) -> Array:
    """The inverse of `beside`."""
    return x if of.R == 1 else jnp.concatenate([x[:, r * of.size : (r + 1) * of.size] for r in range(of.R)], axis=0)


def along_lanes(x: Array, of: Sizes) -> Array:
    """Rows [R, size] one after another, [1, R x size]."""
    return x if of.R == 1 else jnp.concatenate([x[r : r + 1] for r in range(of.R)], axis=1)


def product(a: Array, b: Array, dimensions: Any) -> Array:
    """A product that accumulates in float32, of float32 in full precision."""
    dtype = accumulation_dtype(a.dtype)
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(a, b, dimensions, precision=precision, preferred_element_type=dtype)


def logits_of(k: Array, q: Array, of: Sizes) -> tuple[Array, Array | None]:
    """Logits [keys, R x size] of k [h, keys] and q [h, R x size], and their derivative by q . k under a soft cap."""
    z = product(k, q, TN) * of.numbers.query_scale
    if not of.numbers.softcap:
        return z, None
    tanh = jnp.tanh(z / of.numbers.softcap)
    return of.numbers.softcap * tanh, 1 - tanh * tanh


def mask_of(queries: Array, keys: Array, window: Any, of: Sizes) -> Array:
    """bool[keys, R x size]. queries: int32[8, size], keys: int32[8, keys], as `packed_marks` has them."""
    number, place = queries[0:1], queries[2:3]
    columns = keys.T
    enter, leave, position = (columns[:, i : i + 1] for i in range(3))
    near = (place - position < window) | (window == 0)
    sees = ((enter <= number) & (number < leave) & near).astype(jnp.int32)
    return (sees if of.R == 1 else jnp.concatenate([sees] * of.R, axis=1)) != 0


def weights_of(z: Array, mask: Array, lse: Array) -> Array:
    """Attention weights [keys, R x size] from the log-sum-exps [1, R x size]."""
    return jnp.where(mask, jnp.exp(jnp.where(mask, z - lse, MASKED)), 0)


class Specs(NamedTuple):
    """Block specs of the arrays; those of a kernel that has keys and values in VMEM at once differ for these."""

    queries: pl.BlockSpec  # queries, results and their derivatives
    keys: pl.BlockSpec
    rows: pl.BlockSpec  # log-sum-exps [N, K, R, L]
    query_marks: pl.BlockSpec
    key_marks: pl.BlockSpec


def specs_of(of: Sizes, resident: bool) -> Specs:
    """resident: whether all keys of a head are one block."""
    width = of.S if resident else of.width

    def pair(n: Any, p: Any, scalars: Any) -> tuple[Any, Any]:
        found = scalars[n * of.pairs + p]
        return found >> SHIFT, 0 if resident else found & (2**SHIFT - 1)

    def spec(rows: int, columns: int, which: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, rows, columns), lambda n, k, p, *s: (n, k, pair(n, p, s[0])[which]))

    def marks(columns: int, which: int) -> pl.BlockSpec:
        return pl.BlockSpec((None, 8, columns), lambda n, k, p, *s: (n, 0, pair(n, p, s[0])[which]))

    rows = pl.BlockSpec((None, None, of.R, of.size), lambda n, k, p, *s: (n, k, 0, pair(n, p, s[0])[0]))
    return Specs(spec(of.R * of.h, of.size, 0), spec(of.h, width, 1), rows, marks(of.size, 0), marks(width, 1))


def resident(of: Sizes, itemsize: int) -> bool:
    """Whether the keys and values of a head stay in VMEM over all its queries."""
    return 4 * of.S * of.h * itemsize <= RESIDENT_BYTES


def call(
    kernel: Any, name: str, of: Sizes, scalars: Scalars, inputs: list[Any], in_specs: list[Any],
    results: list[Any], out_specs: list[Any], scratch: list[Any], products: int, bytes_accessed: int,
) -> Any:  # fmt: skip
    """Run a kernel over the pairs of blocks. products: matrix products for each logit."""
    heads, itemsize = of.N * of.K * of.R, inputs[0].dtype.itemsize
    blocks = of.size * of.R * of.h * 4 * 12 + 8 * CHUNK * of.R * of.size * 4
    limit = blocks + (4 * of.S if resident(of, itemsize) else 16 * of.width) * of.h * itemsize
    axes = jax.typeof(inputs[0]).manual_axis_type
    return pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axes) for x in results],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(of.N, of.K, jnp.max(scalars.counts)),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=scratch,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=max(32 * MIB, limit + 8 * MIB)
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * products * of.attended * heads * of.h,
            transcendentals=of.attended * heads,
            bytes_accessed=bytes_accessed,
        ),
        interpret=of.interpret,
        name=name,
    )(*scalars, *inputs)


def partial_kernel(kernel: Any, of: Sizes, **static: Any) -> Any:
    """A kernel that takes its scalars as one `Scalars`."""
    count = len(Scalars._fields)
    return lambda *refs: kernel(Scalars(*refs[:count]), *refs[count:], of=of, **static)
