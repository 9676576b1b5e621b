"""The forward pass over packed rows: hidden states of the tokens that actions were chosen from."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxrl_kernels import fused_logprob
from jaxrl_kernels.packed_attention import PackedTokens

from jaxrl_llm.core.hooks import Hook, state_in
from jaxrl_llm.core.soft_thinking import mixture
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.models.canvases import canvases
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.attention import Attend, Weighing, attention
from jaxrl_llm.models.layers.moe import NOT_RECORDED
from jaxrl_llm.models.layers.packed_attention import by_kernel
from jaxrl_llm.models.mesh_axes import row_shards, takes_kernels, token_shards
from jaxrl_llm.models.packing import PackedRows, Packing, paths_flow, rows_of_parents, whole_rows
from jaxrl_llm.models.placement import Placement, placement
from jaxrl_llm.models.policy import Params, Policy

EXPERTS, LOAD = "experts", "router_load"  # what routers of experts leave that can be recorded


class View(NamedTuple):
    """M chosen tokens, the states that they were chosen from, and what goes with them."""

    row: jax.Array  # int32[M]; N or more where there is none
    column: jax.Array  # int32[M]; may be past the end
    states: jax.Array  # [M, D]
    targets: jax.Array  # int32[M]
    temperature: jax.Array  # f32[M]
    floor: jax.Array | None  # f32[M]
    routing: Any = None  # see `packed_states`


def view_of(
    policy: Policy, params: Params, batch: Trajectories, packing: Packing | None, record: str | None = None
) -> View:
    """The tokens that a packing chooses (None: those of whole rows), and at which temperatures they were drawn.

    record: what `packed_states` shall record. Of a masked-diffusion model the rows are those of `canvases`.
    """
    tokens, given = batch.tokens, None
    if policy.config.unmasking is not None:
        tokens, packing = canvases(batch, policy.config.unmasking)
    else:
        packing = whole_rows(batch) if packing is None else packing
    if batch.experts is not None:
        given = batch.experts[:, :, : policy.config.num_layers]
    states, routing = packed_states(policy, params, tokens, packing, given, record, batch.thoughts)
    at = packing.row, packing.column  # what is past the end is read at the end

    def gather(x: jax.Array) -> jax.Array:
        return x.at[at].get(mode="clip")

    temperature = jnp.ones(len(batch.tokens)) if batch.temperature is None else batch.temperature
    floor = None if batch.support_floor is None else gather(batch.support_floor)
    temperature = temperature.at[packing.row].get(mode="clip")
    view = View(*at, states, gather(batch.tokens), temperature, floor, routing)
    if policy.hook is None or policy.hook.factor is None:
        return view
    entropy = jax.lax.stop_gradient(logp_at(policy, params, view._replace(floor=None))[1])
    return view._replace(temperature=temperature * policy.hook.factor(entropy, numbers_of(policy.hook, batch, packing)))


def numbers_of(hook: Hook, batch: Trajectories, packing: Packing) -> dict[str, jax.Array]:
    """The numbers f32[M] of a hook at the chosen tokens, from those of their rows."""
    return {name: x.at[packing.row].get(mode="clip") for name, x in state_in(hook, batch.info).items()}


@jax.named_scope("head")
def logp_at(policy: Policy, params: Params, view: View) -> tuple[jax.Array, jax.Array]:
    """Log-probability and entropy f32[M] of the chosen tokens, at their temperatures, of their truncated support."""
    return fused_logprob(
        policy.head_states(params, view.states), policy.unembedding(params), view.targets,
        temperature=view.temperature, softcap=policy.config.logit_softcap, support_floor=view.floor,
        vocab_size=policy.config.unpadded,
    )  # fmt: skip


def packed_states(
    policy: Policy, params: Params, tokens: Array, packing: Packing, experts: Array | None = None,
    record: str | None = None, thoughts: Array | None = None,
) -> tuple[Array, Any]:  # fmt: skip
    """The hidden states [M, D] that actions were chosen from, and what is recorded. tokens int32[N, L], of the batch.

    Every packed token goes through the model once, forward and backward: both levels side by side through each layer,
    where suffixes attend to the keys and values of their row of prefixes. Differentiable with respect to params.

    experts: int[N, L, layers, k], with which the tokens go through a mixture of experts (see `moe.expert_mlp`);
    of a token that several rows share, those of the row that is packed. record, of the tokens that are packed: EXPERTS,
    int[N, L, layers, k], NOT_RECORDED elsewhere; LOAD, their `moe.Load` [layers, E]. None: the second result is None.
    thoughts: f32[N, L, 3, K], soft tokens of a policy with `thinking`, which the model sees as mixtures; rows share
    them only where they are equal.
    """
    config, levels = policy.config, packing.levels
    where = placement(config, policy.mesh)
    shapes = [level.source.shape for level in levels]
    rows, columns = row_shards(policy.mesh), token_shards(policy.mesh)
    # Shards of the rows of each level, each with some prefixes and the suffixes that continue them, and of each row's
    # tokens; 1 where it is uneven.
    even = packing.parent is None and not any(R % rows for R, _ in shapes)
    tiles = rows if even else 1, 1 if any(W % columns for _, W in shapes) else columns
    sizes = [level.source.size // (tiles[0] * tiles[1]) for level in levels]

    def concatenated(xs: list[Array]) -> Array:
        """Arrays [R, W, ...] of the levels as [row shards, tokens, ...], the tokens by shard and then by level."""
        each = [x.reshape(tiles[0], -1, tiles[1], x.shape[1] // tiles[1], *x.shape[2:]).swapaxes(1, 2) for x in xs]
        x = jnp.concatenate([x.reshape(*tiles, -1, *x.shape[4:]) for x in each], axis=2)
        return x.reshape(tiles[0], -1, *x.shape[3:])

    def split(x: Array) -> list[Array]:
        x = x.reshape(*tiles, -1, *x.shape[2:])
        return [
            part.reshape(*tiles, -1, level.source.shape[1] // tiles[1], *x.shape[3:])
            .swapaxes(1, 2).reshape(*level.source.shape, *x.shape[3:])
            for level, part in zip(levels, jnp.split(x, sizes[:1], axis=2) if len(levels) > 1 else [x], strict=True)
        ]  # fmt: skip

    # Where there is no token, any serves.
    source, *numbers = (concatenated([getattr(level, name) for level in levels]) for name in PackedRows.__annotations__)
    if takes_kernels(policy.mesh) and config.unmasking is None:  # their numbers are of tries
        (R0, W0), (R1, W1), *_ = (*shapes, (0, 0))
        within = R0 * W0 * (W0 + 1) // 2 + R1 * W1 * (W1 + 1) // 2
        attended = (within + R1 * W1 * W0) // tiles[0]
        attend = by_kernel(config, PackedTokens(*numbers), attended, policy.mesh)
    else:
        attend = _by_levels(config, packing, split, concatenated)
    flow = paths_flow(packing, tiles[0], tiles[1] == 1, split, concatenated) if config.recurrent else None
    position = numbers[-1]
    given = None if experts is None else experts.reshape(-1, *experts.shape[2:])[source]
    mixed = None
    if thoughts is not None and policy.thinking is not None:
        mixed = mixture(policy.thinking, thoughts.reshape(-1, *thoughts.shape[2:])[source])
    hidden, memory = policy.run(
        params, tokens.reshape(-1)[source], position, attend, remat=policy.remat, placement=where, experts=given,
        record=record == EXPERTS, counted=numbers[0] > 0 if record == LOAD else None, flow=flow, mixed=mixed,
    )  # fmt: skip
    states = _states(hidden, packing, tiles, sum(sizes), where)
    if record != EXPERTS:
        return states, memory[1] if record else None
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

    of_parents = partial(rows_of_parents, packing)
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
    suffix_shard, suffix_place = find(packing.suffixes, packing.state - before)
    first = packing.state < before
    suffix_place += before // (tiles[0] * tiles[1])  # behind the prefixes of its shard
    return jnp.where(first, shard, suffix_shard), jnp.where(first, place, suffix_place)


def _visible(level: PackedRows, seen: PackedRows, window: Any = 0) -> Array:
    """bool[R, W, S]: which of the tokens seen [R, S] each token of a level sees. window: see `attention.Weighing`."""
    number = level.enter[:, :, None]
    visible = (seen.enter[:, None] <= number) & (number < seen.leave[:, None])
    if isinstance(window, int) and window == 0:
        return visible
    return visible & ((level.position[:, :, None] - seen.position[:, None] < window) | (window == 0))
