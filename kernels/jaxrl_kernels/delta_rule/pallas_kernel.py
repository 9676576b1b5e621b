"""The gated delta rule as Pallas kernels for TPU (Mosaic).

The chunks of a row go one after the other through the kernel, some heads at a time. The state of the row stays on the
chip from chunk to chunk; so do, in slots, states from which other chunks begin than the next one. In the backward pass
these are their cotangents.
"""

from itertools import chain
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jaxrl_kernels.delta_rule.chunk import Chunk, DeltaInputs, Given, Shares, step
from jaxrl_kernels.partition import zeros

Array = jax.Array
STATES = 32 * 2**20  # bytes of states that are kept on the chip
BLOCKS = 48 * 2**20  # of all else there
MOST_HEADS = 8  # whose products are interleaved
LANES = 128


class Sizes(NamedTuple):
    """Of a call: rows, chunks, heads of values and of keys, tokens of a chunk, sizes of a key and of a value, starts,
    slots, and heads of values of a program."""

    R: int
    n: int
    H: int
    K: int
    C: int
    k: int
    v: int
    s: int
    slots: int
    together: int

    @property
    def keys(self) -> int:
        """Heads of keys of a program."""
        return self.together * self.K // self.H

    @property
    def aligned(self) -> bool:
        """Whether heads lie as the chip's lanes do."""
        return self.k % LANES == 0 and self.v % LANES == 0


def sizes_of(given: Given, starts: Array, branches: int | None) -> Sizes | None:
    """The sizes of a call; None where the states of one head are too many for a chip.

    branches: see `delta_rule`.
    """
    R, n, C, K, k = given[0].q.shape
    (H, v), s = given[0].v.shape[3:], starts.shape[1]
    slots = s + (n if branches is None else min(branches, n))
    tiled = -(-k // 8) * 8 * -(-v // LANES) * LANES  # numbers of a state, as memory lays it out
    of_head = (slots + 2) * tiled * 4
    each = H // K
    fitting = [heads for heads in range(each, max(MOST_HEADS, each) + 1, each)
               if H % heads == 0 and heads * of_head <= STATES]  # fmt: skip
    return Sizes(R, n, H, K, C, k, v, s, slots, fitting[-1]) if fitting else None


def step_flops(of: Sizes) -> int:
    """Operations of `chunk.step` for one head of values: its products, and some for each pair and each number."""
    C, k, v = of.C, of.k, of.v
    doublings = max(C - 1, 0).bit_length()
    pairs = C * C * (4 * k * of.K // of.H + 4 * v + 28) + doublings * 4 * C**3 + doublings * 4 * C * C
    return pairs + 6 * C * k * v + 3 * k * v + 8 * C * (k + v) + 32 * C


class Slots(NamedTuple):
    """Which states of a row are kept beside that of the row, int32[R, n] each."""

    place: Array  # where the state that a chunk begins with lies among those after chunks and the starts
    take: Array  # the slot that a chunk begins with; -1: the state of the row
    keep: Array  # the slot in which the state after it is kept; -1: none


def slots_of(places: Array, starts: int) -> Slots:
    """The slots of chunks that begin at some places: first of the starts, then of what several or later chunks need."""
    R, n = places.shape
    goes_on = places == jnp.arange(n) - 1
    parents = jnp.where(goes_on, n, places)
    parent = zeros((R, n), bool, places).at[jnp.arange(R)[:, None], parents].set(True, mode="drop")
    number = starts + jnp.cumsum(parent, axis=1, dtype=jnp.int32) - 1
    of_parent = jnp.take_along_axis(number, jnp.minimum(places, n - 1), axis=1)
    take = jnp.where(goes_on, -1, jnp.where(places < n, of_parent, places - n))
    return Slots(places, take, jnp.where(parent, number, -1))


def _heads(x: Array, count: int) -> Array:
    """Heads side by side [C, count m] one after the other, [count, C, m]."""
    size = x.shape[1] // count
    return jnp.stack([x[:, i * size : (i + 1) * size] for i in range(count)])


def _side_by_side(x: Array) -> Array:
    """The inverse of `_heads`."""
    return jnp.concatenate(list(x), axis=-1)


def _read(x: DeltaInputs, shares: Shares | None, of: Sizes) -> tuple[Chunk, Shares | None]:
    """The blocks of a chunk, heads first."""
    q, k = (_heads(ref[0, 0], of.keys) for ref in (x.q, x.k))
    chunk = Chunk(q, k, _heads(x.v[0, 0], of.together), x.g[0, 0], x.beta[0, 0])
    return chunk, jax.tree.map(lambda ref: ref[0, 0], shares)


def _forward_kernel(
    place: Any, take: Any, keep: Any, x: Any, shares: Any, starts: Any, out: Any, last: Any, *rest: Any, of: Sizes
) -> None:
    *after, slots, state = rest
    row, chunk = pl.program_id(0), pl.program_id(2)

    @pl.when(chunk == 0)
    def _() -> None:
        slots[: of.s] = starts[0]

    taken, kept = take[row, chunk], keep[row, chunk]

    @pl.when(taken >= 0)
    def _() -> None:
        state[...] = slots[taken]

    own, own_shares = _read(x, shares, of)
    found, new = step(own, state[...], own_shares)
    out[0, 0], last[0], state[...] = _side_by_side(found), new, new
    for ref in after:
        ref[0, 0] = new

    @pl.when(kept >= 0)
    def _() -> None:
        slots[kept] = new


def _backward_kernel(
    place: Any, take: Any, keep: Any, x: Any, shares: Any, starts: Any, before: Any, d_out: Any, d_last: Any, d_x: Any,
    d_starts: Any, d_slots: Any, d_state: Any, *, of: Sizes,
) -> None:  # fmt: skip
    row, chunk = pl.program_id(0), of.n - 1 - pl.program_id(2)

    @pl.when(chunk == of.n - 1)
    def _() -> None:
        d_slots[...] = jnp.zeros_like(d_slots)
        d_state[...] = d_last[0]

    taken, kept, at = take[row, chunk], keep[row, chunk], place[row, chunk]

    @pl.when(kept >= 0)
    def _() -> None:
        d_state[...] += d_slots[kept]

    own, own_shares = _read(x, shares, of)
    state = jnp.where(at < of.n, before[0, 0], starts[0, jnp.maximum(at - of.n, 0)])
    pull = jax.vjp(lambda x, state: step(x, state, own_shares), own, state)[1]
    d_own, d_before = pull((_heads(d_out[0, 0], of.together), d_state[...]))
    for ref, value in zip(d_x, chain(map(_side_by_side, d_own[:3]), d_own[3:]), strict=True):
        ref[0, 0] = value
    d_state[...] = jnp.where(taken >= 0, 0, d_before)

    @pl.when(taken >= 0)
    def _() -> None:
        d_slots[taken] += d_before

    @pl.when(chunk == 0)
    def _() -> None:
        d_starts[0] = d_slots[: of.s]


class Specs(NamedTuple):
    """Blocks of the arrays of a call, of chunks in the order in which they are computed."""

    x: DeltaInputs
    shares: Shares
    starts: Any
    states: Any  # after each chunk
    last: Any  # after the last
    before: Any  # the state that a chunk begins with, if it is one of those


def _specs(of: Sizes, backwards: bool) -> Specs:
    def at(c: Any) -> Any:
        return of.n - 1 - c if backwards else c

    def tokens(size: int) -> Any:
        return pl.BlockSpec((1, 1, of.C, size), lambda r, h, c, *slots: (r, at(c), 0, h))

    def blocks(heads: int, *sizes: int, shared: bool = False) -> Any:
        return pl.BlockSpec((1, 1, heads, *sizes), lambda r, h, c, *slots: (r, at(c), 0 if shared else h, 0, 0))

    def of_entry(r: Any, h: Any, c: Any, place: Any, *slots: Any) -> Any:
        return r, jnp.minimum(place[r, at(c)], of.n - 1), h, 0, 0

    keys, values, numbers = tokens(of.keys * of.k), tokens(of.together * of.v), blocks(of.together, 1, of.C)
    marks, one = blocks(1, 1, of.C, shared=True), blocks(1, 1, 1, shared=True)
    starts = pl.BlockSpec((1, of.s, of.together, of.k, of.v), lambda r, h, c, *slots: (r, 0, h, 0, 0))
    last = pl.BlockSpec((1, of.together, of.k, of.v), lambda r, h, c, *slots: (r, h, 0, 0))
    before = pl.BlockSpec((1, 1, of.together, of.k, of.v), of_entry)
    return Specs(
        DeltaInputs(keys, keys, values, numbers, numbers), Shares(marks, marks, marks, one), starts,
        blocks(of.together, of.k, of.v), last, before,
    )  # fmt: skip


def _laid_out(x: DeltaInputs) -> DeltaInputs:
    """Heads side by side, and what is a number for each head along tokens."""
    q, k, v = (each.reshape(*each.shape[:3], -1) for each in x[:3])
    return DeltaInputs(q, k, v, *(jnp.swapaxes(each, 2, 3)[:, :, :, None] for each in x[3:]))


def _call(
    kernel: Any, name: str, of: Sizes, places: Array, inputs: Any, in_specs: Any, out_shape: Any, out_specs: Any,
    times: int, interpret: bool,
) -> Any:  # fmt: skip
    """times: how often the operations of a forward pass."""
    moved = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((inputs, out_shape)))
    chunks, axes = of.R * of.H * of.n, jax.typeof(places).manual_axis_type
    out_shape = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axes), out_shape)
    state, dtype = (of.together, of.k, of.v), inputs[0].g.dtype
    return pl.pallas_call(
        lambda *refs: kernel(*refs, of=of),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3, grid=(of.R, of.H // of.together, of.n), in_specs=in_specs, out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM((of.slots, *state), dtype), pltpu.VMEM(state, dtype)],
        ),
        out_shape=out_shape,
        name=name,
        interpret=interpret,
        cost_estimate=pl.CostEstimate(
            flops=times * chunks * step_flops(of), bytes_accessed=moved,
            transcendentals=times * chunks * (of.C * of.C + 2 * of.C + 1),
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=STATES + BLOCKS
        ),
    )(*slots_of(places, of.s), *inputs)  # fmt: skip


def forward(
    given: Given, places: Array, starts: Array, of: Sizes, *, interpret: bool, states: bool = True
) -> tuple[Array, ...]:
    """Outputs, the states after the last chunk, and those after each (not without `states`); see `chunk.forward`."""
    x, shares = given
    specs, own = _specs(of, backwards=False), _laid_out(x)
    dtype = x.g.dtype
    out_shape = [
        jax.ShapeDtypeStruct(own.v.shape, x.v.dtype), jax.ShapeDtypeStruct((of.R, of.H, of.k, of.v), dtype),
        *[jax.ShapeDtypeStruct((of.R, of.n, of.H, of.k, of.v), dtype)] * states,
    ]  # fmt: skip
    out, *found = _call(
        _forward_kernel, "delta_rule", of, places, (own, shares, starts),
        (specs.x, None if shares is None else specs.shares, specs.starts), out_shape,
        [specs.x.v, specs.last, *[specs.states] * states], 1, interpret,
    )  # fmt: skip
    return out.reshape(x.v.shape), *found


def backward(
    given: Given, places: Array, starts: Array, after: Array, d_out: Array, d_last: Array, of: Sizes, *, interpret: bool
) -> tuple[DeltaInputs, Array]:
    """The cotangents of the inputs and of `starts`; see `chunk.backward`."""
    x, shares = given
    specs, own = _specs(of, backwards=True), _laid_out(x)
    shapes = jax.tree.map(lambda each: jax.ShapeDtypeStruct(each.shape, each.dtype), (own, starts))
    d_x, d_starts = _call(
        _backward_kernel, "delta_rule_backward", of, places,
        (own, shares, starts, after, d_out.reshape(own.v.shape), d_last),
        (specs.x, None if shares is None else specs.shares, specs.starts, specs.before, specs.x.v, specs.last),
        shapes, (specs.x, specs.starts), 3, interpret,
    )  # fmt: skip
    tokens = (d.reshape(each.shape) for d, each in zip(d_x[:3], x[:3], strict=True))
    return DeltaInputs(*tokens, *(jnp.swapaxes(d[:, :, :, 0], 2, 3) for d in d_x[3:])), d_starts
