"""One decoder for every supported family: pure functions over a pytree of weights.

N rows, L tokens, S cache slots, D hidden, K key-value heads, h head size.

Parameters: {"embed": [V, D], "final_norm": [D], "unembed": [V, D] unless tied, "layers": ...} where the layers
are either dicts of arrays with a leading layer axis, one for each kind of layer (scanned: compile time does not grow
with depth), or a tuple of dicts (unrolled: no copy of a layer's weights per step); see `stacks`. The structure decides.
A layer may hold low-rank adapters of its projections too (`lora`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core.soft_thinking import Mixed
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.attention import Attend, norm
from jaxrl_llm.models.layers.layer import LayerInputs, PassSettings, run_layer
from jaxrl_llm.models.layers.parts import Rotations, accumulation_dtype, ropes_of_kind, rotations_of
from jaxrl_llm.models.layers.projections import linear, project, scaled_low_rank
from jaxrl_llm.models.layers.recurrent import Flow
from jaxrl_llm.models.placement import ANYWHERE, Placement, all_but_weights
from jaxrl_llm.models.stacks import Block, blocks_of, of_kind, place_of

Params = dict[str, Any]
# Whether layers are recomputed in the backward pass; or what of them is saved, one of jax.checkpoint_policies.
Remat = bool | Callable[..., bool]


def run(
    params: Params,
    config: ModelConfig,
    tokens: jax.Array,
    positions: jax.Array,
    attend: Attend,
    memory: Any = None,
    *,
    rotations: tuple[Rotations, ...] | None = None,
    dtype: Any = None,
    activations: Any = None,
    rounding: str | None = None,
    remat: Remat = False,
    placement: Placement = ANYWHERE,
    experts: jax.Array | None = None,
    record: bool = False,
    counted: jax.Array | None = None,
    absorbed: bool = False,
    again: Callable[[Any, Any], Any] = lambda given, after: given,
    flow: Flow | None = None,
    mixed: Mixed | None = None,
) -> tuple[jax.Array, Any]:
    """Hidden states after the last norm, [N, L, D], and the layers' memory as `attend` leaves it.

    tokens, positions: int32[N, L]; memory: one pytree a layer, as a tuple where the layers are a tuple or of several
    kinds, else stacked along a leading layer axis (None: there is none). rotations: `rotations_of` the positions, where
    they are already computed. placement: how states and weights are sharded. experts: int[N, L, layers, k], of each
    token in each layer of a mixture, see `moe.expert_mlp`. record: the second result is (memory, the experts of each
    token, in the same form). counted: bool[N, L], without `record`: the second result is (memory, the `moe.Load` of
    these tokens, [layers, E] each, zeros of layers without experts). absorbed: see `latent.latent_heads`. again:
    the memory that a layer gets which attends to another's keys, made of what that one got and what it left; the former
    by default. flow: of layers that carry states; a model without any needs none. mixed: what the model sees in
    place of some tokens, see `embed`. For the other arguments see `forward`.
    """
    dtype = dtype or params["embed"].dtype
    x = placement.states(embed(params, config, tokens, dtype, mixed).astype(activations or dtype), False)
    rotations = rotations or rotations_of(config, positions, accumulation_dtype(dtype))
    layers, inputs = params["layers"], layer_inputs(params, config, tokens, x, dtype)
    settings = PassSettings(config, attend, flow, placement, dtype, rounding, record, absorbed, counted)
    keep: Any = None
    if remat or placement.gathers:
        keep = remat if callable(remat) else None if remat else all_but_weights
        # In unrolled layers common-subexpression elimination would undo the rematerialisation.
        keep = partial(jax.checkpoint, prevent_cse=isinstance(layers, tuple), policy=keep)
    wrap = keep or (lambda block: block)
    if isinstance(layers, tuple):
        x, left = _unrolled(config, settings, wrap, layers, x, memory, rotations, inputs, experts, again)
    else:
        x, left = _scanned(config, settings, wrap, layers, x, memory, rotations, inputs, experts)
    return norm(x, params["final_norm"], config) if config.final_norm else x, left


def _unrolled(
    config: ModelConfig, settings: PassSettings, wrap: Any, layers: tuple[Params, ...], x: jax.Array, memory: Any,
    rotations: tuple[Rotations, ...], inputs: jax.Array | None, experts: jax.Array | None, again: Any,
) -> tuple[jax.Array, Any]:  # fmt: skip
    memories = (None,) * len(layers) if memory is None else memory
    kinds = config.kind_of_layer or (0,) * len(layers)
    # Traced once for all layers of one kind.
    runs = [partial(run_layer, config=own, settings=settings) for own in config.each_kind]
    layer_runs = [jax.jit(wrap(run), static_argnums=(2, 3)) for run in runs]
    ropes = [ropes_of_kind(config, kind) for kind in range(len(layer_runs))]
    latest = dict[str, tuple[int, Any]]()  # by kind: the number of its last layer, its keys and values
    after: list[Any] = []
    routing: list[Any] = []
    for number, (layer, kind) in enumerate(zip(layers, kinds, strict=True)):
        own, source, keys = config.each_kind[kind], number, None
        if own.keys_of:
            source, keys = latest[own.keys_of]
        got = memories[number] if source == number else again(memories[source], after[source])
        marks, own_inputs = (None if y is None else y[:, :, number] for y in (experts, inputs))
        given = LayerInputs(got, marks, own_inputs, keys)
        rope = ropes[kind].index(config.rope_of_layer[number])
        x, left = layer_runs[kind](x, layer, config.window_of_layer[number], rope, rotations[kind], given)
        if config.kinds and source == number:
            latest[config.kinds[kind].name] = number, left.keys
        after.append(None)
        after[source] = left.memory
        routing.append(left.routing)
    return x, _with_routing(settings, tuple(after), partial(_stacked, routing))


def _stacked(each: list[Any], axis: int) -> Any:
    return jax.tree.map(lambda *y: jnp.stack(y, axis), *each)


def _moved(layers: Any, axis: int) -> Any:
    return jax.tree.map(lambda y: jnp.moveaxis(y, 0, axis), layers)


def _with_routing(settings: PassSettings, memory: Any, each: Callable[[int], Any]) -> Any:
    """The memory of layers, with what all routers leave where it is asked for. each: this, the layers at an axis."""
    return (memory, each(2 if settings.record else 0)) if settings.record or settings.counted is not None else memory


def _scanned(
    config: ModelConfig, settings: PassSettings, wrap: Any, layers: Params, x: jax.Array, memory: Any,
    rotations: tuple[Rotations, ...], inputs: jax.Array | None, experts: jax.Array | None,
) -> tuple[jax.Array, Any]:  # fmt: skip
    latest: dict[str, Any] = {}
    kept: list[Any] = [None] * config.num_layers
    routing: list[Any] = [None] * config.num_layers
    for block in blocks_of(config):
        over = _over(config, block, layers, memory, inputs, experts)
        body = partial(_pattern, config, settings, wrap, block, rotations)
        if not config.kinds:
            (x, _), left = jax.lax.scan(body, (x, latest), over)
            (found, marks), *_ = left
            return x, _with_routing(settings, found, partial(_moved, marks))
        if block.repeats == 1:
            (x, latest), left = body((x, latest), jax.tree.map(lambda y: y[0], over))
            left = jax.tree.map(lambda y: y[None], left)
        else:
            latest = _none_yet(config, block, x) | latest
            (x, latest), left = jax.lax.scan(body, (x, latest), over)
        for place, number in enumerate(block.layers):
            turn, position = divmod(place, len(block.pattern))
            kept[number], routing[number] = jax.tree.map(lambda y, turn=turn: y[turn], left[position])
    return x, _with_routing(settings, tuple(kept), partial(_stacked, routing))


def _over(
    config: ModelConfig, block: Block, layers: Params, memory: Any, inputs: jax.Array | None, experts: jax.Array | None
) -> Any:
    """What each turn of a block's scan gets, with an axis of turns: weights by kind, numbers of layers, the rest.

    Where a turn gets several there is an axis of these too; else there is none, since XLA copies weights that only
    change their shape on the way into a loop.
    """

    def of_turns(x: jax.Array, start: int, each: int) -> jax.Array:
        x = x[start : start + each * block.repeats]
        return x if each == 1 else x.reshape(block.repeats, each, *x.shape[1:])

    weights = {}
    for kind in dict.fromkeys(block.pattern):
        start = place_of(config, block.start + block.pattern.index(kind))
        cut = partial(of_turns, start=start, each=block.pattern.count(kind))
        weights[kind] = jax.tree.map(cut, of_kind(layers, config, kind))
    cut = partial(of_turns, start=block.start, each=len(block.pattern))
    rest = jax.tree.map(cut, (tuple(None if x is None else jnp.moveaxis(x, 2, 0) for x in (inputs, experts)), memory))
    return weights, cut(jnp.arange(config.num_layers, dtype=jnp.int32)), *rest


def _pattern(
    config: ModelConfig, settings: PassSettings, wrap: Any, block: Block, rotations: tuple[Rotations, ...],
    carry: tuple[jax.Array, dict[str, Any]], over: Any,
) -> tuple[tuple[jax.Array, dict[str, Any]], list[Any]]:  # fmt: skip
    """The layers of one turn of a block. The carry: states, and the latest keys and values that others attend to."""
    (x, latest), (weights, numbers, (inputs, experts), memory) = carry, over
    latest, left, used, attended = dict(latest), [], dict[int, int](), {own.keys_of for own in config.each_kind}
    for position, kind in enumerate(block.pattern):
        own, place = config.each_kind[kind], used.get(kind, 0)
        used[kind] = place + 1
        each = (numbers, memory, experts, inputs)
        if len(block.pattern) > 1:
            each = jax.tree.map(lambda y, i=position: y[i], each)
        number, own_memory, marks, own_inputs = each
        window, rope = _window_and_rope(config, block, position, number)
        given = LayerInputs(own_memory, marks, own_inputs, latest.get(own.keys_of))
        alone = block.pattern.count(kind) == 1
        run = wrap(partial(_run_layer_at, place=None if alone else place, config=own, settings=settings))
        x, found = run(x, weights[kind], window, rope, rotations[kind], given)
        name = config.kinds[kind].name if config.kinds else ""
        if name and name in attended:
            latest[name] = found.keys
        left.append((None if own.keys_of else found.memory, found.routing))
    return (x, latest), left


def _run_layer_at(
    x: jax.Array, of_kind: Params, window: Any, rope: Any, rotations: Rotations, given: LayerInputs,
    place: int | None, config: ModelConfig, settings: PassSettings,
) -> Any:  # fmt: skip
    """`run_layer` of one of several layers of a kind, which lie one after another; place None: of one that is alone.

    It is taken where it is recomputed: the backward pass then keeps no copy of the layers' weights beside them.
    """
    layer = of_kind if place is None else jax.tree.map(lambda y: y[place], of_kind)
    return run_layer(x, layer, window, rope, rotations, given, config, settings)


def _window_and_rope(config: ModelConfig, block: Block, position: int, number: jax.Array) -> tuple[Any, Any]:
    """The window and the rotation of the layers at a position of a block: a number where layers are of several kinds
    and all have the same, else as data."""
    ropes, of_position = ropes_of_kind(config, block.pattern[position]), block.layers[position :: len(block.pattern)]
    windows = tuple(config.window_of_layer[number] for number in of_position)
    turns = tuple(ropes.index(config.rope_of_layer[number]) for number in of_position)
    if config.kinds and len(set(windows)) == len(set(turns)) == 1:
        return windows[0], turns[0]
    turn = (number - block.start) // len(block.pattern)
    return jnp.asarray(windows, jnp.int32)[turn], jnp.asarray(turns, jnp.int32)[turn]


def _none_yet(config: ModelConfig, block: Block, x: jax.Array) -> dict[str, Any]:
    """Keys and values, of zeros, of the kinds of a block that later layers attend to."""
    attended = {own.keys_of for own in config.each_kind}
    found = {}
    for kind in set(block.pattern):
        if (name := config.kinds[kind].name) in attended:
            heads, *sizes = config.each_kind[kind].heads_kept(absorbed=False)
            found[name] = tuple(jnp.zeros((*x.shape[:2], heads, size), x.dtype) for size in sizes)
    return found


@jax.named_scope("embedding")
def embed(params: Params, config: ModelConfig, tokens: jax.Array, dtype: Any, mixed: Mixed | None = None) -> jax.Array:
    """The states [N, L, D] that tokens int32[N, L] begin with.

    mixed: [N, L, K] each, what stands in place of a token where its weights are not all 0.
    """
    x = _looked_up(params, tokens, dtype)
    if mixed is not None:
        soft = jnp.any(mixed.weights > 0, axis=-1)
        # One after another, so that no array is [N, L, K, D].
        terms = (
            mixed.weights[..., j, None].astype(dtype) * _looked_up(params, mixed.ids[..., j], dtype)
            for j in range(mixed.ids.shape[-1])
        )
        x = jnp.where(soft[..., None], sum(terms), x)
    return x if config.embedding_scale == 1.0 else x * jnp.asarray(config.embedding_scale, dtype)


def _looked_up(params: Params, tokens: jax.Array, dtype: Any) -> jax.Array:
    x = params["embed"][tokens].astype(dtype)
    if "embed_lora_in" in params:
        low_rank = scaled_low_rank(params["embed_lora_in"][tokens].astype(dtype), params)
        x = x + linear(low_rank, params["embed_lora_out"].astype(dtype))
    return x


@jax.named_scope("embedding")
def layer_inputs(params: Params, config: ModelConfig, tokens: jax.Array, x: jax.Array, dtype: Any) -> jax.Array | None:
    """Each token's embedding of each layer, [N, L, layers, inputs], of its number and of its embedding x (Gemma 4)."""
    if not config.layer_inputs:
        return None
    shape = (*tokens.shape, config.num_layers, config.layer_inputs)
    own = (params["embed_inputs"][tokens].astype(dtype) * jnp.asarray(config.layer_inputs**0.5, dtype)).reshape(shape)
    weight = params["project_inputs"].astype(dtype)
    projected = (project(x, weight, params, "project_inputs") * config.hidden_size**-0.5).reshape(shape)
    return (norm(projected, params["inputs_norm"], config) + own) * jnp.asarray(2.0**-0.5, dtype)
