"""Mixture of experts: each token goes through its best few MLPs, weighted by the router.

On a mesh every device routes its own tokens. Experts are split over the axis "expert": devices that differ in it gather
each other's tokens, send them through the experts that they hold, and sum and scatter the results. No token is dropped,
whatever the router chooses, and the programs have one shape. A device with T tokens of D numbers, of b bytes, receives
(e - 1) T (D b + 8 k) bytes over e devices before its k experts of each token, and (e - 1) T D b after; as much again in
the backward pass. Sending each token to the devices of its experts only would save nothing where k >= e, and take the
same buffers, as all may go to one. Inner units are split over "tensor", at one more sum of [T, D].

Routing replay (2512.01374, section 4): the experts of tokens may be given, as another policy or another precision chose
them; the router then only weighs them, which is differentiable as ever.

The load of experts can be counted (`Load`), which training balances (`learner.router_balance`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxrl_kernels.partition import dividing, mesh_of, vary_together

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.parts import accumulation_dtype, softmax, unit_norm
from jaxrl_llm.models.layers.products import matrix_product, ragged_product
from jaxrl_llm.models.layers.projections import scaled_low_rank
from jaxrl_llm.models.layers.ragged import groups_of
from jaxrl_llm.models.mesh_axes import EXPERT, TENSOR, split_spec
from jaxrl_llm.models.parameters import LORA_IN, LORA_OUT, LORA_SCALE
from jaxrl_llm.models.placement import ANYWHERE
from jaxrl_llm.models.quantised import is_rounded
from jaxrl_llm.models.quantised.layers import rounded_specs

WEIGHTS = (
    "router", "gate", "up", "down", "router_bias", "router_correction", "router_norm", "expert_scale", "gate_bias",
    "up_bias", "down_bias", *(f"{name}{half}" for name in ("gate", "up", "down") for half in (LORA_IN, LORA_OUT)),
    LORA_SCALE,
)  # fmt: skip
MAX_ROUTED = 2**16  # choices of gathered tokens beyond which they go through the experts a device's share at a time
NOT_RECORDED = -1  # in place of a token's experts, where the router chooses them
Gated = Callable[[jax.Array, jax.Array], jax.Array]  # inner units, of gates and units
Routed = tuple[tuple[str, ...], tuple[str, ...]]


class Load(NamedTuple):
    """What the tokens that count ask of each expert, [..., E]; sums over tokens, so that those of parts add up."""

    chosen: jax.Array  # how many tokens went through it
    probability: jax.Array  # sum of its scores, those of a token (softmax or sigmoids) divided by their sum


def index_dtype(config: ModelConfig) -> Any:
    """The smallest dtype of the numbers of experts, with NOT_RECORDED: int8 of up to 128, else int16."""
    return jnp.int8 if config.num_experts <= 128 else jnp.int16


def not_recorded(given: jax.Array | None, shape: tuple[int, ...], config: ModelConfig) -> jax.Array:
    """The experts [N, L, k] of a layer that has none."""
    dtype = index_dtype(config) if given is None else given.dtype
    return jnp.full((*shape, config.experts_per_token), NOT_RECORDED, dtype)


def no_load(config: ModelConfig, dtype: Any) -> Load:
    """The load of a layer that has no experts. dtype: of states."""
    return Load(*[jnp.zeros(config.num_experts, accumulation_dtype(dtype))] * 2)


@jax.named_scope("experts")
def expert_mlp(
    x: jax.Array, layer: dict[str, Any], config: ModelConfig, gated: Gated, routed: Routed = ANYWHERE.routed,
    experts: jax.Array | None = None, record: bool = False, scored: jax.Array | None = None,
    counted: jax.Array | None = None,
) -> Any:  # fmt: skip
    """Route x [N, L, D] through `experts_per_token` of E gated MLPs and add up their outputs, [N, L, D].

    Weights are softmax probabilities over all experts, or sigmoids of their scores (float32), renormalised over the
    chosen ones where the configuration says so. No token is dropped: tokens are sorted by expert and multiplied in
    ragged groups, so the output of a token does not depend on the others in the batch.
    layer: router [D, E], gate and up [E, D, F], down [E, F, D], biases, and adapters of each expert. scored: [N, L, D],
    what the router sees instead of x. routed: axes of the mesh over which N and L are split, where they divide; the
    mesh is that of the arrays. experts: int[N, L, k], the experts of each token, instead of the router's choice;
    NOT_RECORDED leaves it to the router. Their weights are the current router's, with its gradient. record: return
    (output, the experts in `index_dtype` [N, L, k]). counted: bool[N, L], return (output, the `Load` [E] of these
    tokens), without `record`.
    """
    weights = {name: layer[name] for name in WEIGHTS if name in layer}
    scored = x if scored is None else scored
    mesh = mesh_of(None, x, weights)
    if mesh is None:
        return _on_device(x, scored, weights, experts, counted, config, gated, record)
    rows, columns = (dividing(mesh, axes, size) for axes, size in zip(routed, x.shape, strict=False))
    # Of rounded weights, the scales have an axis of length 1 where the values have inputs.
    specs = {
        name: rounded_specs(name, w, config, mesh) if is_rounded(w)
        else jax.tree.map(lambda x, n=name: split_spec(n, x.shape, config, mesh), w)
        for name, w in weights.items()
    }  # fmt: skip
    split = {axis for spec in jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec)) for axis in spec}
    run = partial(
        _on_device, config=config, gated=gated, record=record, split=EXPERT in split, summed=TENSOR in split,
        exchanged=EXPERT in (rows or ()), tokens_over=(*_names(rows), *_names(columns)),
    )  # fmt: skip
    spec = PartitionSpec(rows, columns)
    found = (spec, spec) if record else spec if counted is None else (spec, PartitionSpec())
    over = (spec, spec, specs, spec, spec)
    return jax.shard_map(run, mesh=mesh, in_specs=over, out_specs=found)(x, scored, weights, experts, counted)


def _names(axes: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The axes of one entry of a PartitionSpec."""
    return (axes,) if isinstance(axes, str) else axes or ()


def _on_device(
    x: jax.Array, scored: jax.Array, layer: dict[str, Any], experts: jax.Array | None, counted: jax.Array | None,
    config: ModelConfig, gated: Gated, record: bool = False, split: bool = False, exchanged: bool = False,
    summed: bool = False, tokens_over: tuple[str, ...] = (),
) -> Any:  # fmt: skip
    """`expert_mlp` of a device's tokens [n, l, D], whose experts [n, l, k] may be given.

    split: experts are, over "expert". exchanged: tokens are too, otherwise all devices along it have these. summed:
    inner units are split over "tensor". tokens_over: the axes of the mesh over which tokens are split.
    """
    shape = x.shape
    x, scored = (y.reshape(-1, shape[-1]) for y in (x, scored))
    logits = _logits(scored, layer, config)
    tokens = (x, *_choices(logits, layer, config, experts))
    first = jax.lax.axis_index(EXPERT) * layer["gate"].shape[0] if split else 0
    # The bias of what is summed over devices is added on one of them.
    once = jax.lax.axis_index(TENSOR) == 0 if summed else True
    through = partial(_through, layer=layer, gated=gated, first=first, some=split, once=once)
    if split and exchanged:
        gathered = tuple(jax.lax.all_gather(y, EXPERT, tiled=True) for y in tokens)
        if gathered[2].size > MAX_ROUTED:
            parts = jax.tree.map(lambda y: y.reshape(-1, x.shape[0], y.shape[-1]), gathered)
            out = jax.lax.map(lambda part: jax.checkpoint(through)(*part), parts).reshape(-1, shape[-1])
        else:
            out = through(*gathered)
        out = jax.lax.psum_scatter(out, EXPERT, tiled=True)
    else:
        out = through(*tokens)
        out = jax.lax.psum(out, EXPERT) if split else out
    out = (jax.lax.psum(out, TENSOR) if summed else out).reshape(shape)
    if counted is not None:
        load = _load(_scores(logits, config), tokens[2], counted.reshape(-1))
        return out, jax.lax.psum(load, tokens_over) if tokens_over else load
    return (out, tokens[2].astype(index_dtype(config)).reshape(*shape[:-1], -1)) if record else out


def _logits(x: jax.Array, layer: dict[str, Any], config: ModelConfig) -> jax.Array:
    """The router's logits of all experts [T, E], in float32."""
    if config.router_norm:
        x = unit_norm(x, config.norm_epsilon) * layer["router_norm"].astype(x.dtype) * config.hidden_size**-0.5
    logits = matrix_product(x, layer["router"]).astype(accumulation_dtype(x.dtype))
    return logits + layer["router_bias"].astype(logits.dtype) if "router_bias" in layer else logits


def _scores(logits: jax.Array, config: ModelConfig) -> jax.Array:
    """The scores of all experts [..., E], a softmax or sigmoids."""
    return jax.nn.sigmoid(logits) if config.router_sigmoid else softmax(logits)


def _load(scores: jax.Array, experts: jax.Array, counted: jax.Array) -> Load:
    """The load of a device's tokens: scores [T, E], experts int32[T, k], counted bool[T]."""
    one = counted.astype(scores.dtype)
    none = jnp.zeros_like(scores, shape=scores.shape[-1:])
    chosen = none.at[experts.reshape(-1)].add(jnp.repeat(one, experts.shape[-1]))
    share = scores / (jnp.sum(scores, axis=-1, keepdims=True) + 1e-20)
    return Load(jax.lax.stop_gradient(chosen), jnp.sum(jnp.where(counted[:, None], share, 0), axis=0))


def _choices(
    logits: jax.Array, layer: dict[str, Any], config: ModelConfig, given: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """The weights [T, k] and numbers int32[T, k] of each token's experts, by the logits of all [T, E].

    given: int[..., k], see `expert_mlp`.
    """
    _, experts = jax.lax.top_k(_ranked(logits, layer, config), config.experts_per_token)
    if given is not None:
        given = given.reshape(experts.shape).astype(experts.dtype)
        experts = jnp.where(given == NOT_RECORDED, experts, given)
    # A softmax over all experts, renormalised over the chosen ones, is one over these.
    of_chosen = config.normalise_router and not config.router_sigmoid
    # A sum of one number and zeros, whose gradient needs no scatter.
    of_each = experts[:, :, None] == jnp.arange(logits.shape[-1])
    weights = jnp.sum(of_each * (logits if of_chosen else _scores(logits, config))[:, None], axis=-1)
    if of_chosen:
        weights = _scores(weights, config)
    elif config.normalise_router:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    if config.router_scale != 1:
        weights = weights * config.router_scale
    return weights * layer["expert_scale"][experts] if config.router_norm else weights, experts


def _ranked(logits: jax.Array, layer: dict[str, Any], config: ModelConfig) -> jax.Array:
    """Numbers [T, E] by which experts are chosen: scores, corrected, and of the best groups of experts only.

    A group's rank is the sum of its two best scores (DeepSeek-V3, 2412.19437, section 2.1.2).
    """
    logits = jax.lax.stop_gradient(logits)
    whole = config.router_groups == config.router_chosen_groups
    if whole and not (config.router_correction or config.router_sigmoid):
        return logits  # a softmax keeps their order
    ranked = _scores(logits, config)
    if config.router_correction:
        ranked = ranked + jax.lax.stop_gradient(layer["router_correction"]).astype(ranked.dtype)
    if whole:
        return ranked
    by_group = ranked.reshape(len(ranked), config.router_groups, -1)
    best, _ = jax.lax.top_k(by_group, min(2, by_group.shape[-1]))
    _, groups = jax.lax.top_k(jnp.sum(best, axis=-1), config.router_chosen_groups)
    chosen = jnp.any(groups[:, :, None] == jnp.arange(config.router_groups), axis=1)
    return jnp.where(chosen[:, :, None], by_group, -jnp.inf).reshape(ranked.shape)


def _through(
    x: jax.Array, weights: jax.Array, experts: jax.Array, layer: dict[str, Any], gated: Gated,
    first: jax.Array | int, some: bool, once: jax.Array | bool,
) -> jax.Array:  # fmt: skip
    """The weighted sum [T, D] of the outputs of each token's experts, of which `layer` has those from `first` on.

    experts: int32[T, k]. some: some of them are not in the layer; they give nothing. once: whether the bias of outputs
    is added here.
    """
    count, chosen, numbers = layer["gate"].shape[0], experts.shape[1], experts.reshape(-1) - first
    if some:
        numbers = jnp.where((numbers >= 0) & (numbers < count), numbers, count)  # after all groups
    place = jnp.arange(len(numbers), dtype=jnp.int32)
    number, order = jax.lax.sort((numbers, place), num_keys=1)
    _, back = jax.lax.sort((order, place), num_keys=1)
    groups = groups_of(number, count)
    # Rows that are in no group are not defined, also in gradients.
    keep = (lambda y: jnp.where((number < count)[:, None], y, 0)) if some else (lambda y: y)
    rows = keep(_taken(*vary_together(x, order, back), chosen))

    def product(x: jax.Array, name: str) -> jax.Array:
        out = ragged_product(x, layer[name], groups)
        if name + LORA_IN in layer:
            low_rank = keep(scaled_low_rank(ragged_product(x, layer[name + LORA_IN], groups), layer))
            out = out + ragged_product(low_rank, layer[name + LORA_OUT], groups)
        bias = layer.get(f"{name}_bias")
        if bias is not None:
            bias = bias if name != "down" or once is True else jnp.where(once, bias, 0)
            # Exact as a product with ones and zeros, whose gradient needs no scatter.
            own = groups.own.astype(out.dtype)
            out = out + jnp.matmul(own, bias.astype(out.dtype), precision=jax.lax.Precision.HIGHEST)
        return keep(out)

    out = product(gated(product(rows, "gate"), product(rows, "up")), "down")
    out = _taken(*vary_together(out, back, order), 1).reshape(*experts.shape, -1)
    return jnp.sum(out * weights[..., None].astype(x.dtype), axis=1)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _taken(x: jax.Array, order: jax.Array, back: jax.Array, each: int) -> jax.Array:
    """Rows [M * each, D] of x [M, D], each as often as `each` says, in an order int32[M * each]; back: its inverse.

    The gradient takes rows in the inverse order: a scatter would add them one by one.
    """
    return x.at[order // each if each > 1 else order].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _taken_backward(each: int, residuals: tuple[jax.Array, jax.Array], d: jax.Array) -> tuple[jax.Array, None, None]:
    order, back = residuals
    d = _taken(d, back, order, 1)
    return d if each == 1 else jnp.sum(d.reshape(-1, each, d.shape[-1]), axis=1), None, None


_taken.defvjp(lambda x, order, back, each: (_taken(x, order, back, each), (order, back)), _taken_backward)
