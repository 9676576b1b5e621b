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
from jaxrl_kernels.packed_attention import PackedTokens

from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.attention import Attend, Weighing, attention
from jaxrl_llm.models.layers.delta import DeltaInputs, chunked
from jaxrl_llm.models.layers.moe import NOT_RECORDED
from jaxrl_llm.models.layers.packed_attention import by_kernel
from jaxrl_llm.models.layers.paths import in_chunks, out_of_chunks, paths_of
from jaxrl_llm.models.layers.recurrent import Flow, along
from jaxrl_llm.models.placement import Placement, placement, row_shards, takes_kernels, token_shards
from jaxrl_llm.models.policy import Params, Policy, positions_of
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
    real = batch.token_mask.astype(jnp.int32)
    source = jnp.arange(N * L, dtype=jnp.int32).reshape(N, L)
    flat = source.reshape(-1)
    # A row's first token was chosen from nothing; it is never an action.
    paths = _paths(source, real, 0, jnp.arange(N, dtype=jnp.int32) * L)
    return Packing(paths, None, None, flat // L, flat % L, jnp.maximum(flat - 1, 0), runs=1)


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


def packed_states(
    policy: Policy, params: Params, tokens: Array, packing: Packing, experts: Array | None = None, record: bool = False,
    load: bool = False,
) -> Any:  # fmt: skip
    """The hidden states [M, D] that actions were chosen from. tokens int32[N, L], of the batch.

    Every packed token goes through the model once, forward and backward: both levels side by side through each layer,
    where suffixes attend to the keys and values of their row of prefixes. Differentiable with respect to params.

    experts: int[N, L, layers, k], with which the tokens go through a mixture of experts (see `moe.expert_mlp`);
    of a token that several rows share, those of the row that is packed. record: return (states, experts [N, L, layers,
    k] of the tokens that are packed, NOT_RECORDED elsewhere). load: return (states, the `moe.Load` of the tokens that
    are packed, each of which counts once, [layers, E] each), without `record`.
    """
    config, levels = policy.config, packing.levels
    where = placement(config, policy.mesh)
    tiles = _tiles(packing, row_shards(policy.mesh), token_shards(policy.mesh))
    sizes = [level.source.size // (tiles[0] * tiles[1]) for level in levels]

    def concatenated(xs: list[Array]) -> Array:
        """Arrays [R, W, ...] of the levels as [row shards, tokens, ...], the tokens by shard and then by level."""
        each = [x.reshape(tiles[0], -1, tiles[1], x.shape[1] // tiles[1], *x.shape[2:]).swapaxes(1, 2) for x in xs]
        x = jnp.concatenate([x.reshape(*tiles, -1, *x.shape[4:]) for x in each], axis=2)
        return x.reshape(tiles[0], -1, *x.shape[3:])

    def split(x: Array) -> list[Array]:
        """The inverse of `concatenated`."""
        x = x.reshape(*tiles, -1, *x.shape[2:])
        parts = jnp.split(x, sizes[:1], axis=2) if len(levels) > 1 else [x]
        return [
            part.reshape(*tiles, -1, level.source.shape[1] // tiles[1], *x.shape[3:])
            .swapaxes(1, 2).reshape(*level.source.shape, *x.shape[3:])
            for level, part in zip(levels, parts, strict=True)
        ]  # fmt: skip

    # Where there is no token, any serves.
    source, *numbers = (concatenated([getattr(level, name) for level in levels]) for name in PackedRows.__annotations__)
    if takes_kernels(policy.mesh):
        attend = by_kernel(config, PackedTokens(*numbers), _attended(packing, tiles[0]), policy.mesh)
    else:
        attend = _by_levels(config, packing, split, concatenated)
    flow = _flow(packing, split, concatenated) if config.recurrent else None
    position = numbers[-1]
    given = None if experts is None else experts.reshape(-1, *experts.shape[2:])[source]
    hidden, memory = policy.run(
        params, tokens.reshape(-1)[source], position, attend, remat=policy.remat, placement=where, experts=given,
        record=record, counted=numbers[0] > 0 if load else None, flow=flow,
    )  # fmt: skip
    states = _states(hidden, packing, tiles, sum(sizes), where)
    if not record:
        return (states, memory[1]) if load else states
    chosen, size = memory[1], tokens.size
    at = jnp.where(numbers[0] > 0, source, size).reshape(-1)
    found = jnp.full((size, *chosen.shape[2:]), NOT_RECORDED, chosen.dtype)
    found = found.at[at].set(chosen.reshape(-1, *chosen.shape[2:]), mode="drop")
    return states, found.reshape(*tokens.shape, *chosen.shape[2:])


def _states(hidden: Array, packing: Packing, tiles: tuple[int, int], size: int, where: Placement) -> Array:
    """The states [M, D] of actions among hidden states [row shards, tokens, D]. size: of a device's tokens."""
    shard, place = _of_states(packing, tiles)
    if packing.shards > 1 and packing.shards == tiles[0] * tiles[1]:  # no state leaves its device
        states = hidden.reshape(packing.shards, -1, hidden.shape[-1])
        found = jax.vmap(lambda x, at: x[at])(states, place.reshape(packing.shards, -1))
        return where.states(found.reshape(-1, hidden.shape[-1]), True)
    return where.states(hidden.reshape(-1, hidden.shape[-1])[shard * size + place], True)


def _by_levels(
    config: ModelConfig, packing: Packing, split: Callable[[Array], list[Array]], joined: Callable[[list[Array]], Array]
) -> Attend:
    """Attention by dense masks, of each level to itself and to its prefixes. split, joined: tokens of the levels."""
    levels = packing.levels

    of_parents = partial(_of_parents, packing)
    seen = levels[:1]
    if len(levels) > 1:
        seen = [*seen, jax.tree.map(lambda a, b: jnp.concatenate([of_parents(a), b], axis=1), *levels)]
    windows = any(config.window_of_layer)
    visible = [_visible(level, keys) for level, keys in zip(levels, seen, strict=True)]

    def attend(q: Array, k: Array, v: Array, memory: Any, how: Weighing) -> tuple[Array, None]:
        keys, values = ([x.swapaxes(1, 2) for x in split(y)] for y in (k, v))
        if len(levels) > 1:
            keys, values = ([x[0], jnp.concatenate([of_parents(x[0]), x[1]], axis=2)] for x in (keys, values))
        out = []
        for query, key, value, level, all_seen, sees in zip(split(q), keys, values, levels, seen, visible, strict=True):
            near = partial(_visible, seen=all_seen, window=how.window if windows else 0)
            sees = near(level) if windows else sees
            out.append(attention(query, key, value, sees, how, (level, near)))
        return joined(out), None

    return attend


def _of_parents(packing: Packing, x: Array) -> Array:
    """The row of prefixes [R0, ...] that each row of suffixes continues, [R1, ...]."""
    each = packing.levels[-1].source.shape[0] // packing.levels[0].source.shape[0]
    return jnp.repeat(x, each, axis=0) if packing.parent is None else x[packing.parent]


def _flow(packing: Packing, split: Callable[[Array], list[Array]], joined: Callable[[list[Array]], Array]) -> Flow:
    """How tokens follow each other along the paths of both levels; nothing is left. split, joined: see `_by_levels`."""
    levels, of_parents = packing.levels, partial(_of_parents, packing)
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
            starts = jnp.zeros((len(level.entry), 0, H, *size), inputs.v.dtype)
            if after is not None:
                known = of_parents(after)
                starts = jnp.take_along_axis(known, level.starts[:, :, None, None, None], axis=1)
            found, states = chunked(inputs, level.entry, starts)
            out.append(out_of_chunks(found, level))
            after = states
        return joined(out), None

    return Flow(before, delta, lambda x, window, taps: None)


def _attended(packing: Packing, shards: int) -> int:
    """How many pairs of tokens attend to each other in a shard, at most."""
    (R0, W0) = packing.prefixes.source.shape
    R1, W1 = (0, 0) if packing.suffixes is None else packing.suffixes.source.shape
    return (R0 * W0 * (W0 + 1) // 2 + R1 * W1 * (W1 + 1) // 2 + R1 * W1 * W0) // shards


def _tiles(packing: Packing, rows: int, tokens: int) -> tuple[int, int]:
    """Into how many shards the packed rows of each level are cut, and the tokens of each row; 1 where it is uneven.

    Row shards are spread over devices, each with some prefixes and the suffixes that continue them.
    """
    shapes = [level.source.shape for level in packing.levels]
    even = packing.parent is None and not any(R % rows for R, _ in shapes)
    return rows if even else 1, 1 if any(W % tokens for _, W in shapes) else tokens


def _of_states(packing: Packing, tiles: tuple[int, int]) -> tuple[Array, Array]:
    """Of each action's state, the shard and the place in it; int32[M] each."""

    def find(level: PackedRows, number: Array) -> tuple[Array, Array]:
        R, W = level.source.shape[0] // tiles[0], level.source.shape[1] // tiles[1]
        row, column = number // (W * tiles[1]), number % (W * tiles[1])
        return row // R * tiles[1] + column // W, row % R * W + column % W

    shard, place = find(packing.prefixes, packing.state)
    if packing.suffixes is None:
        return shard, place
    before = packing.prefixes.source.size
    after = find(packing.suffixes, packing.state - before)
    first = packing.state < before
    size = before // (tiles[0] * tiles[1])
    return jnp.where(first, shard, after[0]), jnp.where(first, place, size + after[1])


def _visible(level: PackedRows, seen: PackedRows, window: Any = 0) -> Array:
    """bool[R, W, S]: which of the tokens seen [R, S] each token of a level sees. window: see `attention.Weighing`."""
    number = level.enter[:, :, None]
    visible = (seen.enter[:, None] <= number) & (number < seen.leave[:, None])
    if isinstance(window, int) and window == 0:
        return visible
    distance = level.position[:, :, None] - seen.position[:, None]
    return visible & ((distance < window) | (window == 0))
