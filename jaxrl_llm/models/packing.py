"""How the tokens of a batch lie in memory when the model sees them: shared prefixes once, short rows side by side.

N rows of L positions (`Trajectories`) become packed rows of other lengths. Rows that begin alike form a prefix trie,
whose tokens are numbered in depth-first order: those that continue a token have the numbers [enter, leave) of its own.
A token attends to another exactly if its number lies in the other's interval: to the tokens before it on its own path,
and to itself. So a prompt and its completions, several short sequences in a row, and trees of rollouts are one mask.

There are two levels, so that attention is cheap without a kernel for sparse masks: prefixes (prompts, or whole rows),
and suffixes, packed rows of tokens that each continue something of one packed row of prefixes. Numbers are unique in
all rows of a packing, so that the kernel for sparse masks (`packed_attention`) needs nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.models.layers.delta import DeltaInputs, chunked
from jaxrl_llm.models.layers.paths import in_chunks, out_of_chunks, paths_of
from jaxrl_llm.models.layers.recurrent import Flow, along
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
    # The most runs of a packed row (`paths`), for models that carry states; 0: not counted.
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
    row = jnp.broadcast_to(jnp.arange(N, dtype=jnp.int32)[:, None], place.shape)
    flat = row.reshape(-1), place.reshape(-1)
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
        own = (N // G) * width + jnp.arange(N)[:, None] * T + jnp.arange(T - 1)
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


def _at_parents(packing: Packing, x: Array, at: Array) -> Array:
    """Of what prefixes have [R0, n, ...], that at some places int32[R1, s] for each row of suffixes, [R1, s, ...].

    No row of prefixes is copied whole, as states of all its chunks would be many times the model's.
    """
    if packing.parent is not None:
        return x[packing.parent[:, None], at]
    R0, (R1, s) = len(x), at.shape
    found = jnp.take_along_axis(x, at.reshape(R0, -1, *[1] * (x.ndim - 2)), axis=1)
    return found.reshape(R1, s, *x.shape[2:])


def paths_flow(packing: Packing, split: Callable[[Array], list[Array]], joined: Callable[[list[Array]], Array]) -> Flow:
    """How tokens follow each other along the paths of both levels; nothing is left.

    split, joined: tokens of the levels, apart and together.
    """
    levels, of_parents = packing.levels, partial(rows_of_parents, packing)
    if not packing.runs:
        raise InputError(
            "this packing does not say how many runs its rows have, which a model that carries states needs: plan the "
            "steps with runs=True"
        )
    paths = [paths_of(levels[0], packing.runs)]
    if len(levels) > 1:
        of_prefixes = jax.tree.map(of_parents, paths[0])
        paths.append(paths_of(levels[1], packing.runs, jax.tree.map(of_parents, levels[0]), of_prefixes))

    def before(x: Array, steps: int, window: Array | None) -> Array:
        parts = split(x)
        first = along(parts[0], paths[0].before, steps)
        if len(parts) == 1:
            return joined([first])
        W = parts[1].shape[1]
        outer = jax.tree.map(of_parents, (parts[0], paths[0].before))
        links = jnp.concatenate([paths[1].before, jnp.where(outer[1] < 0, -1, W + outer[1])], axis=1)
        return joined([first, along(jnp.concatenate([parts[1], outer[0]], axis=1), links, steps)[:, :W]])

    def delta(x: DeltaInputs, state: Array | None) -> tuple[Array, None]:
        parts = list(zip(*(split(y) for y in x), strict=True))
        out: list[Array] = []
        after: Array | None = None
        for level, each in zip(paths, parts, strict=True):
            cut = partial(in_chunks, paths=level)
            inputs = DeltaInputs(*map(cut, each))
            H, size = inputs.k.shape[-2], (inputs.k.shape[-1], inputs.v.shape[-1])
            starts = jnp.zeros((len(level.entry), 0, H, *size), inputs.g.dtype)
            if after is not None:
                starts = _at_parents(packing, after, level.starts)
            found, states = chunked(inputs, level.entry, starts)
            out.append(out_of_chunks(found, level))
            after = states
        return joined(out), None

    return Flow(before, delta, lambda x, window, taps: None)
