"""How the tokens of a batch lie in memory when the model sees them: shared prefixes once, short rows side by side.

N rows of L positions (`Trajectories`) become packed rows of other lengths. Rows that begin alike form a prefix trie,
whose tokens are numbered in depth-first order: those that continue a token have the numbers [enter, leave) of its own.
A token attends to another exactly if its number lies in the other's interval: to the tokens before it on its own path,
and to itself. So a prompt and its completions, several short sequences in a row, and trees of rollouts are one mask.

There are two levels, so that attention is cheap without a kernel for sparse masks: prefixes (prompts, or whole rows),
and suffixes, packed rows of tokens that each continue something of one packed row of prefixes. Numbers are unique in
all rows of a packing, so that the kernel for sparse masks (`packed_attention`) needs nothing else.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
from jaxrl_kernels.delta_rule import DeltaInputs, delta_rule

from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.models.layers.delta import CHUNK, in_chunks
from jaxrl_llm.models.layers.recurrent import Flow, convolve, only
from jaxrl_llm.models.policy import positions_of
from jaxrl_llm.utils.errors import InputError

Indices = Any  # int32 array: of jax, or of numpy where the host makes it


class PackedRows(flax.struct.PyTreeNode):
    """R packed rows of W tokens; int32[R, W] each. Where there is no token, enter and leave are 0."""

    source: Indices  # row * L + column of the token in the batch
    enter: Indices  # number of the token, at least 1
    leave: Indices  # one more than the last number that continues it
    position: Indices  # tokens before it on its path


class Packing(flax.struct.PyTreeNode):
    """Where the model sees the tokens of a batch, and where the M states are that its actions were chosen from."""

    prefixes: PackedRows
    suffixes: PackedRows | None
    parent: Indices | None  # int32[R]: row of prefixes that a row of suffixes continues; None: dealt evenly, in order
    row: Indices  # int32[M], of the action; N or more where there is none
    column: Indices  # int32[M]
    state: Indices  # int32[M]: index into the states of all prefixes, then of all suffixes
    shards: int = flax.struct.field(pytree_node=False, default=1)  # parts of M, each with states of one device
    # The most runs of a packed row, each of which begins a chunk (`Paths`), for models that carry states; 0: not
    # counted, and they begin anywhere.
    runs: int = flax.struct.field(pytree_node=False, default=0)

    @property
    def levels(self) -> list[PackedRows]:
        """The prefixes, and the suffixes where there are some."""
        return [self.prefixes] + ([] if self.suffixes is None else [self.suffixes])


def whole_rows(batch: Trajectories) -> Packing:
    """Every row as it is, and every position as an action."""
    N, L = batch.tokens.shape
    flat = jnp.arange(N * L, dtype=jnp.int32)
    # A row's first token was chosen from nothing; it is never an action.
    return Packing(_rows(batch.token_mask), None, None, flat // L, flat % L, jnp.maximum(flat - 1, 0), runs=1)


def states_at(mask: Array, place: Array) -> Packing:
    """Every row as it is, and of each only the states at some tokens, N x S in order. mask: bool[N, L], true on tokens,
    which stand before all padding; place: int32[N, S]."""
    N, L = mask.shape
    flat = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32)[:, None], place.shape).reshape(-1), place.reshape(-1)
    return Packing(_rows(mask), None, None, *flat, flat[0] * L + flat[1], runs=1)


def _rows(mask: Array) -> PackedRows:
    """Rows as they are. mask: bool[N, L], true on tokens."""
    N, L = mask.shape
    source = jnp.arange(N * L, dtype=jnp.int32).reshape(N, L)
    return _paths(source, mask.astype(jnp.int32), 0, jnp.arange(N, dtype=jnp.int32) * L)


def shared_prompts(batch: Trajectories, group_size: int, prompt_length: int, completion_length: int) -> Packing:
    """Each group's prompt once, and a row of suffixes for each of its rows; pure, so it can be called under jit.

    Rows of a group stand next to each other and begin with the same prompt. prompt_length: tokens before the first
    action, at most. completion_length: tokens from the first action on, at most; each is listed as an action. All
    three are static, and every row must keep within them. InputError where the rows are no whole groups.
    """
    G, T = group_size, completion_length
    N, L = batch.tokens.shape
    if N % G:
        raise InputError(f"{N} rows are not whole groups of {G}: change one of them")
    start = jnp.where(jnp.any(batch.action_mask, axis=1), jnp.argmax(batch.action_mask, axis=1), L)
    # Some rows' first actions may be masked out, or all: what the group shares ends where the first of any row begins.
    start = jnp.min(start.reshape(-1, G), axis=1)
    # A group without actions may be all prompt, longer than the bound; it counts for nothing, so it may be cut.
    width = min(prompt_length, L)
    first = jnp.arange(N // G) * G * L
    real = (batch.token_mask[::G, :width] & (jnp.arange(width) < start[:, None])).astype(jnp.int32)
    last = jnp.maximum(width - 1 - jnp.argmax(real[:, ::-1], axis=1), 0) + jnp.arange(N // G) * width
    # A group's numbers: those of its prompt, then those of each of its rows.
    before = jnp.arange(N // G, dtype=jnp.int32) * (width + G * T)
    prefixes = _paths((first[:, None] + jnp.arange(width)).astype(jnp.int32), real, 0, before, width + G * T)
    start, prompt = jnp.repeat(start, G), jnp.repeat(jnp.sum(real, axis=1), G)
    place = start[:, None] + jnp.arange(T)
    row = jnp.broadcast_to(jnp.arange(N)[:, None], place.shape)
    state = jnp.repeat(last, G)[:, None]
    suffixes = None
    if T > 1:
        # The last token is computed for nothing, so that the row's length is T, which devices may divide.
        column = jnp.minimum(place, L - 1)
        known = jnp.take_along_axis(batch.token_mask, column, axis=1) & (place < L)
        source = (jnp.arange(N)[:, None] * L + column).astype(jnp.int32)
        of_row = jnp.repeat(before, G) + width + jnp.arange(N, dtype=jnp.int32) % G * T
        suffixes = _paths(source, known.astype(jnp.int32), prompt[:, None], of_row, T)
        own = (N // G) * width + jnp.arange(N)[:, None] * T + jnp.arange(T - 1)  # behind the prompts of all groups
        state = jnp.concatenate([state, own], axis=1)
    states = state.reshape(-1).astype(jnp.int32)
    return Packing(prefixes, suffixes, None, row.reshape(-1), place.reshape(-1), states, runs=1)


def _paths(source: Array, real: Array, before: Array | int, number: Array, size: int | None = None) -> PackedRows:
    """Rows of one path each, which continues `before` tokens; a row's numbers are number + 1 to number + size."""
    position = positions_of(real)
    enter = (number[:, None] + position + 1) * real
    leave = (number[:, None] + (source.shape[1] if size is None else size) + 1) * real
    return PackedRows(source, enter, leave, before + position)


def rows_of_parents(packing: Packing, x: Array) -> Array:
    """The row of prefixes [R0, ...] that each row of suffixes continues, [R1, ...]."""
    each = packing.levels[-1].source.shape[0] // packing.levels[0].source.shape[0]
    return jnp.repeat(x, each, axis=0) if packing.parent is None else x[packing.parent]


def paths_flow(
    packing: Packing, shards: int, whole: bool, split: Callable[[Array], list[Array]],
    joined: Callable[[list[Array]], Array],
) -> Flow:  # fmt: skip
    """How tokens follow each other along the paths of both levels; nothing is left.

    shards: of rows. whole: no row's tokens are on several devices. split, joined: tokens of the levels, apart and
    together.
    """
    levels = packing.levels
    if not packing.runs:
        raise InputError(
            "this packing does not say how many runs its rows have, which a model that carries states needs: plan the "
            "steps with runs=True"
        )
    widths = [level.source.shape[1] for level in levels]
    chunked = zip(levels, (-(-width // CHUNK) * CHUNK for width in widths), strict=True)
    cuts = [len(level.source) // shards * width for level, width in chunked]
    as_they_are = whole and not any(width % CHUNK for width in widths)

    def in_order(x: Array) -> Array:
        """Tokens in the order of their states: those of prefixes, then of suffixes, each row in whole chunks."""
        if as_they_are:
            return x
        each = [in_chunks(part, -(-part.shape[1] // CHUNK), CHUNK) for part in split(x)]
        return jnp.concatenate([part.reshape(shards, -1, *x.shape[2:]) for part in each], axis=1)

    def as_before(x: Array) -> Array:
        """The inverse of `in_order`."""
        if as_they_are:
            return x
        parts = jnp.split(x, cuts[:1], axis=1) if len(levels) > 1 else [x]
        rows = [part.reshape(len(level.source), -1, *x.shape[2:]) for part, level in zip(parts, levels, strict=True)]
        return joined([row[:, :width] for row, width in zip(rows, widths, strict=True)])

    enter, leave = (in_order(joined([getattr(level, name) for level in levels])) for name in ("enter", "leave"))
    rows = [len(level.source) // shards for level in levels]
    paths, real = paths_of(enter, leave, packing.runs * sum(rows)), enter > 0
    branches = rows[0] * packing.runs + sum(rows[1:]) * (packing.runs - 1)  # runs that others continue: no row's last

    def convolved(x: Array, weight: Array, window: Array | None) -> Array:
        return as_before(convolve_paths(in_order(x), weight, paths))

    def delta(x: DeltaInputs, state: Array | None) -> tuple[Array, None]:
        x = only(jax.tree.map(in_order, x), real)
        n = paths.entry.shape[1]
        chunks = jax.tree.map(lambda y: y.reshape(shards, n, CHUNK, *y.shape[2:]), x)
        starts = jnp.zeros((shards, 0, x.v.shape[2], x.k.shape[3], x.v.shape[3]), x.g.dtype)
        out, _ = delta_rule(chunks, paths.entry, starts, branches=branches)
        return as_before(out.reshape(x.v.shape)), None

    return Flow(convolved, delta, lambda x, window, taps: None)


class Paths(NamedTuple):
    """Where the tokens of rows continue each other, for layers that carry a state from token to token.

    The tokens of a packing are paths of tries. A run is a part of a path that nothing branches from but at its end: its
    tokens stand next to each other, from the beginning of a chunk of `CHUNK` places on, and the rest of its last chunk
    is empty. A run begins with the state that the run before it on its path left. S rows of T tokens, n = T / CHUNK
    chunks of each.
    """

    entry: Array  # int32[S, n], what a chunk begins with, see `delta_rule`
    before: Array  # int32[S, T], place of the token before; -1: none


def runs_of(enter: Any, leave: Any, array: Any = jnp) -> Any:
    """bool[..., W]: which tokens begin a run. For the numbers see `PackedRows`; array: numpy or jax.numpy."""
    before = [array.concatenate([array.zeros_like(x[..., :1]), x[..., :-1]], axis=-1) for x in (enter, leave)]
    return (enter > 0) & ~((before[0] > 0) & (before[0] + 1 == enter) & (before[1] == leave))


def paths_of(enter: Array, leave: Array, runs: int) -> Paths:
    """The paths of tokens with these numbers, int32[S, T] (`PackedRows`); every token's parent is before it in its row.

    runs: of a row, at most (static). T is a multiple of CHUNK.
    """
    S, T = enter.shape
    n, rows = T // CHUNK, jnp.arange(S)[:, None]
    first, real = runs_of(enter, leave), enter > 0
    starts = jnp.argsort(~first, axis=1, stable=True)[:, :runs]
    begins = jnp.take_along_axis(first, starts, axis=1)
    # The last token of each run: the latest before the next run, or of the row.
    latest = jax.lax.cummax(jnp.where(real, jnp.arange(T), -1), axis=1)
    following = jnp.where(begins, starts, T)
    following = jnp.concatenate([following[:, 1:], jnp.full((S, 1), T, following.dtype)], axis=1)
    ends = jnp.take_along_axis(latest, following - 1, axis=1)
    # What a run continues is the last token of another: that with the largest number whose interval holds its own.
    number = jnp.take_along_axis(enter, starts, axis=1)[:, :, None]
    low, high = (jnp.take_along_axis(x, jnp.maximum(ends, 0), axis=1)[:, None] for x in (enter, leave))
    holds = jnp.where(begins[:, None] & (low < number) & (number < high), low, 0)
    parent = jnp.where(jnp.max(holds, axis=2) > 0, jnp.take_along_axis(ends, jnp.argmax(holds, axis=2), axis=1), -1)
    entry = jnp.broadcast_to(jnp.arange(n) - 1, (S, n))
    entry = entry.at[rows, jnp.where(begins, starts // CHUNK, n)].set(parent // CHUNK, mode="drop")
    before = jnp.where(real, jnp.arange(T) - 1, -1).at[rows, jnp.where(begins, starts, T)].set(parent, mode="drop")
    return Paths(entry.astype(jnp.int32), before.astype(jnp.int32))


def convolve_paths(x: Array, weight: Array, paths: Paths) -> Array:
    """`convolve` along paths, x [S, T, C]: in each chunk by itself, and then what the tokens before it add."""
    taps, (S, _, C) = weight.shape[0], x.shape
    own = x.reshape(S, -1, CHUNK, C)
    out = convolve(own, weight, lambda x, steps: jnp.pad(x, ((0, 0), (0, 0), (steps, 0), (0, 0)))[:, :, :CHUNK])
    at = [paths.before[:, ::CHUNK]]  # of the first token of each chunk, the nearest first
    for _ in range(taps - 2):
        at.append(jnp.where(at[-1] >= 0, jnp.take_along_axis(paths.before, jnp.maximum(at[-1], 0), axis=1), -1))
    each = jnp.stack(at, axis=2)
    window = jnp.where((each >= 0)[..., None], x[jnp.arange(S)[:, None, None], jnp.maximum(each, 0)], 0)

    def from_before(place: int) -> Any:
        """What the token at a place of each chunk gets from those before the chunk."""
        return sum(window[:, :, back - place - 1] * weight[-1 - back] for back in range(place + 1, taps))

    more = jnp.stack([from_before(place) for place in range(taps - 1)], axis=2)
    more = jnp.pad(more, ((0, 0), (0, 0), (0, CHUNK - taps + 1), (0, 0)))
    return (out + more).reshape(x.shape)
