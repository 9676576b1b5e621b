"""LoRA (Hu et al. 2021, arXiv 2106.09685): frozen weights, each with a trained product of two low-rank matrices.

A projection W with an adapter computes x W + (alpha / r) (x A) B, where A is [inputs, r] and B is [r, outputs]. The
adapters are a pytree of their own, in the shape of the parameters: A and B of the weight "query" are "query_lora_in"
and "query_lora_out" in the same dictionary of a layer. The factor alpha / r is not trained, so it belongs to the frozen
part: "lora_scale", one number a layer (see `scaled`). The policy gets both parts as one pytree (`parameters.combine`),
and its projections add what their adapters give (`layers.project`).

The sampler decodes with unmerged adapters: the same arithmetic as the trainer's in every dtype, and no second copy of
the weights. Merged weights decode some 10 % faster on CPUs, but in bfloat16 they lose what the adapters add
below 1/512 of a weight; sample with `merge(params)` where that does not matter.

n layers, D hidden, H query heads, K key-value heads, h head size, F inner size, r rank:

    query, key, value   in [n, D, r]      out [n, r, H or K, h]
    out                 in [n, H, h, r]   out [n, r, D]
    gate, up            in [n, D, r]      out [n, r, F]
    down                in [n, F, r]      out [n, r, D]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models.checks import check_key
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.kinds import number, require_kind, shown, whole
from jaxrl_llm.models.parameters import (
    ADAPTED,
    LORA_IN,
    LORA_OUT,
    LORA_SCALE,
    Params,
    adapted_weights,
    adapter_axes,
    combine,
    put,
)
from jaxrl_llm.models.parameters.weight import Weight
from jaxrl_llm.models.stacks import map_kinds
from jaxrl_llm.utils.errors import InputError, unknown

TARGETS = tuple(ADAPTED)


def check(config: ModelConfig, rank: int, targets: Iterable[str] = ()) -> tuple[str, ...]:
    """The targets, in order; none named is every one that the model can have. InputError for what `init` refuses."""
    if isinstance(targets, str) or not isinstance(targets, Iterable):
        raise InputError(
            f"the LoRA targets are {shown(targets)}, but must be a list of names, such as ('query', 'value')"
        )
    names, possible = list(targets), tuple(dict.fromkeys(weight.name for weight in adapted_weights(config).values()))
    for name in names:
        if not isinstance(name, str) or name not in TARGETS:
            raise unknown("LoRA target", str(name), TARGETS)
        if name not in possible:
            raise InputError(
                f"LoRA target {name!r} is a matrix of experts, which cannot have adapters: choose among "
                f"{', '.join(possible[:-1])} and {possible[-1]}"
            )
    require_kind("the LoRA rank", rank, whole(1))
    return tuple(dict.fromkeys(names)) or possible


def init(
    key: jax.Array, config: ModelConfig, rank: int, targets: Iterable[str] = (), dtype: Any = jnp.float32
) -> Params:
    """New adapters, {"layers": {...}} with layers stacked: A uniform within 1 / sqrt(inputs), as the authors' code has
    it, and B zero, so that the policy is unchanged.

    targets: some of query, key, value, out, gate, up, down; by default all that the model can have: of a mixture of
    experts, those of attention. Raises InputError for another name, for a matrix of experts, and for a rank below 1.
    """

    check_key(key)
    targets = check(config, rank, targets)
    params: Params = {}
    weights = [weight for weight in adapted_weights(config).values() if weight.name in targets]
    weights.sort(key=lambda weight: targets.index(weight.name))
    for weight, own_key in zip(weights, jax.random.split(key, len(weights)), strict=True):
        *at, _ = weight.path
        (first, a), (second, b) = adapter_shapes(weight, rank).items()
        bound = math.prod(a[1:-1]) ** -0.5
        put(params, (*at, first), jax.random.uniform(own_key, a, dtype, -bound, bound))
        put(params, (*at, second), jnp.zeros(b, dtype))
    return params


def adapter_shapes(weight: Weight, rank: int) -> dict[str, tuple[int, ...]]:
    """The names and shapes of A and B of a weight's adapter, with an axis of layers."""
    start, end = len(weight.stacked), len(weight.stacked) + weight.inputs
    return dict(zip(
        adapter_axes(weight), ((*weight.shape[:end], rank), (*weight.shape[:start], rank, *weight.shape[end:])),
        strict=True,
    ))  # fmt: skip


def scaled(params: Params, rank: int, alpha: float) -> Params:
    """The parameters with the factor alpha / rank for their adapters, f32[n] (f32[] in each of a tuple of layers).

    Without it the factor is 1. InputError where alpha is not a positive number or the rank is below 1.
    """
    require_kind("the LoRA rank", rank, whole(1))
    require_kind("LoRA's alpha", alpha, number(above=0))
    layers, factor = _layers(params), jnp.float32(alpha / rank)
    if isinstance(layers, tuple):
        return {**params, "layers": tuple({**layer, LORA_SCALE: factor} for layer in layers)}

    def with_factor(layers: Params) -> Params:
        count = jax.tree.leaves(layers)[0].shape[0]
        return {**layers, LORA_SCALE: jnp.full((count,), factor)}

    return {**params, "layers": map_kinds(with_factor, layers)}


def scaled_like(params: Params, other: Params) -> Params:
    """The parameters with the factors for adapters that others have, of the same layers."""
    factors = _kept(other, lambda name: name == LORA_SCALE)
    return combine(params, {"layers": factors})


def split(params: Params) -> tuple[Params, Params]:
    """(weights, adapters): what `parameters.combine` joins. The factors are beside the weights."""
    return (
        {**params, "layers": _kept(params, lambda name: not name.endswith((LORA_IN, LORA_OUT)))},
        {"layers": _kept(params, lambda name: name.endswith((LORA_IN, LORA_OUT)))},
    )


def _kept(params: Params, keep: Callable[[str], bool]) -> Any:
    """Of the layers' arrays, stacked or not, those by whose names `keep` is true; kinds of layers without are none."""
    layers = _layers(params)
    own = lambda layer: {name: x for name, x in layer.items() if keep(name)}  # noqa: E731
    if isinstance(layers, tuple):
        return tuple(map(own, layers))
    found = map_kinds(own, layers)
    return {name: entry for name, entry in found.items() if not isinstance(entry, dict) or entry}


def _layers(params: Params) -> Any:
    layers = params.get("layers") if isinstance(params, dict) else None
    if not isinstance(layers, dict | tuple):
        raise InputError("these are no parameters of a policy: they hold no 'layers'")
    return layers


def adapters_of(params: Params) -> Params:
    """The adapters in a layer's dictionary, with their factor: of the first layer, or of all where stacked."""
    layers = _layers(params)

    def own(layer: Params) -> Params:
        return {name: x for name, x in layer.items() if _is_of_adapter(name)}

    return own(layers[0]) if isinstance(layers, tuple) else map_kinds(own, layers)


def _is_of_adapter(name: str) -> bool:
    return name == LORA_SCALE or name.endswith((LORA_IN, LORA_OUT))


def merge(params: Params) -> Params:
    """The parameters with W + (alpha / r) A B in place of W, and without adapters, in the dtypes of the weights.

    Products are computed in float32. Layers may be stacked or a tuple; what has no adapter, a critic too, is shared
    with the parameters given and not copied.
    """
    layers = _layers(params)
    if isinstance(layers, tuple):
        return {**params, "layers": tuple(_merge(layer, stacked=False) for layer in layers)}
    return {**params, "layers": map_kinds(partial(_merge, stacked=True), layers)}


def _merge(layer: Params, stacked: bool) -> Params:
    """`merge` of one dictionary, of one layer or of all, stacked."""
    merged = {name: w for name, w in layer.items() if not _is_of_adapter(name)}
    add = _add_stacked if stacked else _add
    for name in [name for name in merged if name + LORA_IN in layer]:
        w, a, b = layer[name], layer[name + LORA_IN], layer[name + LORA_OUT]
        merged[name] = add(w, a, b, layer.get(LORA_SCALE, jnp.ones(w.shape[:stacked])))
    return merged


@jax.jit
def _add(w: jax.Array, a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
    """W + scale A B of one layer, in the dtype of W."""
    a, b = a.astype(jnp.float32).reshape(-1, b.shape[0]), b.astype(jnp.float32).reshape(b.shape[0], -1)
    product = scale * jnp.dot(a, b, precision=jax.lax.Precision.HIGHEST)
    return (w.astype(jnp.float32) + product.reshape(w.shape)).astype(w.dtype)


_add_stacked = jax.jit(jax.vmap(_add))
