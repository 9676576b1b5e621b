"""LoRA (Hu et al. 2021, arXiv 2106.09685): frozen weights, each with a trained product of two low-rank matrices.

A projection W with an adapter computes x W + (alpha / r) (x A) B, where A is [inputs, r] and B is [r, outputs]. The
adapters are a pytree of their own, in the shape of the parameters: A and B of the weight "query" are "query_lora_in"
and "query_lora_out" in the same dictionary of a layer. The factor alpha / r is not trained, so it belongs to the frozen
part: "lora_scale", one number a layer (see `scaled`). The policy gets both parts as one pytree (`parameters.combine`),
and its projections add what their adapters give (`projections.project`).

The sampler decodes with unmerged adapters: the same arithmetic as the trainer's in every dtype, and no second copy of
the weights. Merged weights decode some 10 % faster on CPUs, but in bfloat16 they lose what the adapters add
below 1/512 of a weight; sample with `merge(params)` where that does not matter.

n layers, D hidden, H query heads, K key-value heads, h head size, F inner size, r rank:

    query, key, value   in [n, D, r]      out [n, r, H or K, h]
    out                 in [n, H, h, r]   out [n, r, D]
    gate, up            in [n, D, r]      out [n, r, F]
    down                in [n, F, r]      out [n, r, D]

Each expert of a mixture has an adapter of its own, with an axis of experts after that of layers. Adapters of the
embeddings [V, D] are beside them, and so is their factor: "embed_lora_in" [V, r] and "embed_lora_out" [r, D] add to
what a token is embedded as, "unembed_lora_in" [D, r] and "unembed_lora_out" [r, V] to logits (`Policy.head_states`).
"""

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.models import parameters
from jaxrl_llm.models.checks import check_key
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.kinds import number, require_kind, shown, whole
from jaxrl_llm.models.parameters import LORA_IN, LORA_OUT, LORA_SCALE, Params, adapted_weights, combine, put
from jaxrl_llm.models.parameters.weight import Weight
from jaxrl_llm.models.quantised import dense, is_rounded
from jaxrl_llm.models.stacks import map_kinds
from jaxrl_llm.utils.errors import InputError, unknown

TARGETS = tuple(parameters.ADAPTED)


def check(config: ModelConfig, rank: int, targets: Iterable[str] = ()) -> tuple[str, ...]:
    """The targets, in order; where none are named those that `init` takes. InputError for what it refuses."""
    if isinstance(targets, str) or not isinstance(targets, Iterable):
        raise InputError(
            f"the LoRA targets are {shown(targets)}, but must be a list of names, such as ('query', 'value')"
        )
    weights = adapted_weights(config).values()
    names, possible = list(targets), tuple(dict.fromkeys(weight.name for weight in weights))
    for name in names:
        if not isinstance(name, str) or name not in TARGETS:
            raise unknown("LoRA target", str(name), TARGETS)
        if name not in possible:
            why = "is none of this model's matrices"
            if name in ("embed", "unembed"):
                why = "is of tied embeddings, with which an adapter of one alone could not be merged"
            raise InputError(f"LoRA target {name!r} {why}: choose among {', '.join(possible[:-1])} and {possible[-1]}")
    require_kind("the LoRA rank", rank, whole(1))
    return tuple(dict.fromkeys(names or [weight.name for weight in weights if parameters.adapted_by_default(weight)]))


def init(
    key: jax.Array, config: ModelConfig, rank: int, targets: Iterable[str] = (), dtype: Any = jnp.float32
) -> Params:
    """New adapters, {"layers": {...}} with layers stacked: A uniform within 1 / sqrt(inputs), as the authors' code has
    it, and B zero, so that the policy is unchanged; of embeddings, A zero and B normal.

    targets: some of query, key, value, out, gate, up, down and the other names of TARGETS, which are of experts where a
    layer has them; by default all projections of layers but for experts: of a mixture, those of attention. Raises
    InputError for another name, for the embeddings of a model that ties them, and for a rank below 1.
    """

    check_key(key)
    targets = tuple(targets) if isinstance(targets, Iterable) and not isinstance(targets, str) else targets
    names = check(config, rank, targets)
    params: Params = {"layers": {}}
    weights = [
        weight for weight in adapted_weights(config).values()
        if weight.name in names and (targets or parameters.adapted_by_default(weight))
    ]  # fmt: skip
    weights.sort(key=lambda weight: names.index(weight.name))
    for weight, own_key in zip(weights, jax.random.split(key, len(weights)), strict=True):
        *at, _ = weight.path
        (first, a), (second, b) = adapter_shapes(weight, rank).items()
        if weight.name == "embed":
            put(params, (first,), jnp.zeros(a, dtype))
            put(params, (second,), jax.random.normal(own_key, b, dtype))
            continue
        bound = math.prod(a[len(weight.stacked) : -1]) ** -0.5
        put(params, (*at, first), jax.random.uniform(own_key, a, dtype, -bound, bound))
        put(params, (*at, second), jnp.zeros(b, dtype))
    return params


def adapter_shapes(weight: Weight, rank: int) -> dict[str, tuple[int, ...]]:
    """The names and shapes of A and B of a weight's adapter, with its axes of layers and experts."""
    sizes = {**dict(zip(weight.axes, weight.shape, strict=True)), "rank": rank}
    return {name: tuple(sizes[axis] for axis in axes) for name, axes in parameters.adapter_axes(weight).items()}


def scaled(params: Params, rank: int, alpha: float) -> Params:
    """The parameters with the factor alpha / rank for their adapters, f32[n] (f32[] in each of a tuple of layers).

    Without it the factor is 1; that of embeddings is there only where the parameters have adapters of them. InputError
    where alpha is not a positive number or the rank is below 1.
    """
    require_kind("the LoRA rank", rank, whole(1))
    require_kind("LoRA's alpha", alpha, number(above=0))
    layers, factor = _layers(params), jnp.float32(alpha / rank)
    if any(map(_is_matrix, params)):
        params = {**params, LORA_SCALE: factor}
    lead = 0 if isinstance(layers, tuple) else 1

    def with_factor(layers: Params) -> Params:
        return {**layers, LORA_SCALE: jnp.full(jax.tree.leaves(layers)[0].shape[:lead], factor)}

    return {**params, "layers": map_kinds(with_factor, layers)}


def scaled_like(params: Params, other: Params) -> Params:
    """The parameters with the factors for adapters that others have, of the same layers."""
    factors = _kept(other, lambda name: name == LORA_SCALE)
    return combine(params, {"layers": factors, **{name: x for name, x in other.items() if name == LORA_SCALE}})


def split(params: Params) -> tuple[Params, Params]:
    """(weights, adapters): what `parameters.combine` joins. The factors are beside the weights."""
    beside = {name: x for name, x in params.items() if _is_matrix(name)}
    weights = {name: x for name, x in params.items() if name not in beside}
    weights["layers"] = _kept(params, lambda name: not _is_matrix(name))
    return weights, {"layers": _kept(params, _is_matrix), **beside}


def _kept(params: Params, keep: Callable[[str], bool]) -> Any:
    """Of the layers' arrays, stacked or not, those by whose names `keep` is true; kinds of layers without are none."""
    layers = _layers(params)

    def kept(layer: Params) -> Params:
        return {name: x for name, x in layer.items() if keep(name)}

    if isinstance(layers, tuple):
        return tuple(map(kept, layers))
    return {name: entry for name, entry in map_kinds(kept, layers).items() if not isinstance(entry, dict) or entry}


def _layers(params: Params) -> Any:
    layers = params.get("layers") if isinstance(params, dict) else None
    if not isinstance(layers, dict | tuple):
        raise InputError("these are no parameters of a policy: they hold no 'layers'")
    return layers


def adapters_of(params: Params) -> Params:
    """The adapters in a layer's dictionary, with their factor: of the first layer, or of all where stacked."""
    layers = _layers(params)
    return own_adapters(layers[0]) if isinstance(layers, tuple) else map_kinds(own_adapters, layers)


def own_adapters(found: Params) -> Params:
    """The adapters, with their factor, in one dictionary: of a layer, or of what is beside the layers."""
    return {name: x for name, x in found.items() if name in (LORA_SCALE, parameters.LORA_FACTORS) or _is_matrix(name)}


def _is_matrix(name: str) -> bool:
    return name.endswith((LORA_IN, LORA_OUT))


def merge(params: Params) -> Params:
    """The parameters with W + (alpha / r) A B in place of W, and without adapters, in the dtypes of the weights; those
    that are rounded (`quantised`) in that of the embeddings.

    Products are computed in float32. Layers may be stacked or a tuple; what has no adapter, a critic too, is shared
    with the parameters given and not copied.
    """
    layers, own = _layers(params), partial(_merge, dtype=params["embed"].dtype if "embed" in params else jnp.float32)
    return {**own(params), "layers": map_kinds(own, layers)}


def _merge(found: Params, dtype: Any) -> Params:
    """`merge` of one dictionary: of one layer, of all of a kind, stacked, or of what is beside the layers.

    dtype: of what was rounded.
    """
    adapters = own_adapters(found)
    merged = {name: w for name, w in found.items() if name not in adapters}
    rounded = {name for name, w in merged.items() if is_rounded(w)}
    found = {**found, **{name: dense(merged[name]) for name in rounded}}
    merged |= {name: found[name].astype(dtype) for name in rounded}
    for name in [name for name in merged if name + LORA_IN in found]:
        a, b = found[name + LORA_IN], found[name + LORA_OUT]
        a, b = (b.T, a.T) if name == "unembed" else (a, b)  # whose rows are outputs
        w = _add(found[name], a, b, found.get(LORA_SCALE, jnp.float32(1)))
        merged[name] = w.astype(dtype) if name in rounded else w
    return merged


@jax.jit
def _add(w: jax.Array, a: jax.Array, b: jax.Array, scale: jax.Array) -> jax.Array:
    """W + scale A B in the dtype of W. They may have leading axes, of layers and experts, and the scale the first."""
    lead, rank = w.shape[: a.ndim + b.ndim - 2 - w.ndim], a.shape[-1]
    a, b = a.astype(jnp.float32).reshape(*lead, -1, rank), b.astype(jnp.float32).reshape(*lead, rank, -1)
    product = jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST).reshape(w.shape)
    scale = scale.reshape(scale.shape + (1,) * (w.ndim - scale.ndim))
    return (w.astype(jnp.float32) + scale * product).astype(w.dtype)
