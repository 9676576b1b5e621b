"""How the tokens of a batch lie in memory when the model sees them: prompts once, short rows side by side, trees.

N rows of L positions (`Trajectories`) become packed rows of other lengths. What a token sees is told by two numbers:
tokens are numbered so that those that continue a token have the numbers [enter, leave) of its own, in order. A token
sees another exactly if its number lies in the other's interval: the tokens before it on its own path, and itself. So a
prompt and its many completions, several short sequences in a row, and trees of rollouts are one mask.

There are two levels, so that attention needs no kernel for sparse masks to be cheap: roots (prompts, or whole rows),
and branches, packed rows of tokens that each continue something of one packed row of roots.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from jaxrl_llm.models import decoder
from jaxrl_llm.models.placement import placement
from jaxrl_llm.models.policy import Params, Policy, positions_of
from jaxrl_llm.trajectory import Trajectories

Array = jax.Array
Places = Any  # int32: of jax, or of numpy where the host makes them
EVERYTHING = 2**30  # more than any token's number


class Layout(NamedTuple):
    """Static bounds that let a batch of groups share its prompts. Every row must keep within them."""

    group_size: int  # rows of a group stand next to each other and begin with the same prompt
    prompt: int  # tokens before the first action, at most
    completion: int  # tokens from the first action on, at most


class Level(flax.struct.PyTreeNode):
    """R packed rows of W tokens; int32[R, W] each. Where there is no token, enter and leave are 0."""

    source: Places  # row * L + column of the token in the batch
    enter: Places  # number of the token, at least 1
    leave: Places  # one more than the last number that continues it
    position: Places  # tokens before it on its path


class Packing(flax.struct.PyTreeNode):
    """Where the model sees the tokens of a batch, and where the M states lie that its actions were chosen from."""

    roots: Level
    branches: Level | None
    parent: Places | None  # int32[R]: root row that a row of branches continues; None: dealt evenly, in order
    row: Places  # int32[M], of the action; N or more where there is none
    column: Places  # int32[M]
    state: Places  # int32[M]: place in the states of all roots, then of all branches


def whole_rows(batch: Trajectories) -> Packing:
    """Every row as it is, and every position as an action."""
    N, L = batch.tokens.shape
    real = batch.token_mask.astype(jnp.int32)
    source = jnp.arange(N * L, dtype=jnp.int32).reshape(N, L)
    flat = source.reshape(-1)
    # A row's first token was chosen from nothing; it is never an action.
    return Packing(_chains(source, real, 0), None, None, flat // L, flat % L, jnp.maximum(flat - 1, 0))


def shared_prompts(batch: Trajectories, layout: Layout) -> Packing:
    """Each group's prompt once, and a row of branches for each of its rows. Actions are the T places from the first."""
    G, T = layout.group_size, layout.completion
    N, L = batch.tokens.shape
    start = jnp.where(jnp.any(batch.action_mask, axis=1), jnp.argmax(batch.action_mask, axis=1), L)
    # Some rows' first actions may be masked out, or all: what the group shares ends where the first of any row begins.
    start = jnp.min(start.reshape(-1, G), axis=1)
    # A group without actions may be all prompt, longer than the bound; it counts for nothing, so it may be cut.
    width = min(layout.prompt, L)
    first = jnp.arange(N // G) * G * L
    real = (batch.token_mask[::G, :width] & (jnp.arange(width) < start[:, None])).astype(jnp.int32)
    last = jnp.maximum(width - 1 - jnp.argmax(real[:, ::-1], axis=1), 0) + jnp.arange(N // G) * width
    roots = _chains((first[:, None] + jnp.arange(width)).astype(jnp.int32), real, 0)
    start, prompt = jnp.repeat(start, G), jnp.repeat(jnp.sum(real, axis=1), G)
    place = start[:, None] + jnp.arange(T)
    row = jnp.broadcast_to(jnp.arange(N)[:, None], place.shape)
    state = jnp.repeat(last, G)[:, None]
    branches = None
    if T > 1:
        # The last is seen for nothing, so that lengths are what the layout says, which devices may divide.
        column = jnp.minimum(place, L - 1)
        known = jnp.take_along_axis(batch.token_mask, column, axis=1) & (place < L)
        source = (jnp.arange(N)[:, None] * L + column).astype(jnp.int32)
        branches = _chains(source, known.astype(jnp.int32), prompt[:, None])
        own = (N // G) * width + jnp.arange(N)[:, None] * T + jnp.arange(T - 1)
        state = jnp.concatenate([state, own], axis=1)
    return Packing(roots, branches, None, row.reshape(-1), place.reshape(-1), state.reshape(-1).astype(jnp.int32))


def _chains(source: Array, real: Array, before: Array | int) -> Level:
    """Rows of one path each, which continues `before` tokens."""
    position = before + positions_of(real)
    return Level(source, (position + 1) * real, EVERYTHING * real, position)


def packed_states(policy: Policy, params: Params, tokens: Array, packing: Packing) -> Array:
    """The hidden states [M, D] that actions were chosen from. tokens int32[N, L], of the batch.

    Every packed token goes through the model once, forward and backward: both levels side by side through each layer,
    where branches see the keys and values of their root row. Differentiable with respect to params.
    """
    config, levels = policy.config, [packing.roots] + ([] if packing.branches is None else [packing.branches])
    where = placement(config, policy.mesh)
    # Lanes are spread over devices, each with some roots and the branches that continue them.
    data = 1 if policy.mesh is None else policy.mesh.shape.get("data", 1)
    lanes = data if packing.parent is None and all(level.source.shape[0] % data == 0 for level in levels) else 1
    places = [level.source.size // lanes for level in levels]

    def beside(xs: list[Array]) -> Array:
        """Arrays [R, W, ...] of the levels as [lanes, places, ...]."""
        return jnp.concatenate([x.reshape(lanes, -1, *x.shape[2:]) for x in xs], axis=1)

    def apart(x: Array) -> list[Array]:
        """The inverse of `beside`."""
        parts = jnp.split(x, places[:1], axis=1) if len(levels) > 1 else [x]
        return [part.reshape(*level.source.shape, *x.shape[2:]) for level, part in zip(levels, parts, strict=True)]

    def continued(x: Array) -> Array:
        """What the root row of each row of branches has."""
        each = levels[-1].source.shape[0] // levels[0].source.shape[0]
        return jnp.repeat(x, each, axis=0) if packing.parent is None else x[packing.parent]

    seen = levels[:1]
    if len(levels) > 1:
        seen = [*seen, jax.tree.map(lambda a, b: jnp.concatenate([continued(a), b], axis=1), *levels)]
    visible = [_visible(level, keys) for level, keys in zip(levels, seen, strict=True)]

    def attend(q: Array, k: Array, v: Array, memory: Any, window: Any) -> tuple[Array, None]:
        keys, values = ([x.swapaxes(1, 2) for x in apart(y)] for y in (k, v))
        if len(levels) > 1:
            keys, values = ([x[0], jnp.concatenate([continued(x[0]), x[1]], axis=2)] for x in (keys, values))
        out = []
        for query, key, value, level, all_seen, sees in zip(apart(q), keys, values, levels, seen, visible, strict=True):
            if any(config.window_of_layer):
                distance = level.position[:, :, None] - all_seen.position[:, None]
                sees = sees & ((distance < window) | (window == 0))
            out.append(decoder.attention(query, key, value, sees, config))
        return beside(out), None

    # Where there is no token any will do.
    source, position = (beside([getattr(level, name) for level in levels]) for name in ("source", "position"))
    hidden, _ = policy.run(params, tokens.reshape(-1)[source], position, attend, remat=policy.remat, placement=where)
    states = jnp.concatenate([x.reshape(-1, x.shape[-1]) for x in apart(hidden)])
    return where.states(states[packing.state], True)


def _visible(level: Level, seen: Level) -> Array:
    """bool[R, W, S]: which of the tokens seen [R, S] each token of a level sees."""
    number = level.enter[:, :, None]
    return (seen.enter[:, None] <= number) & (number < seen.leave[:, None])
