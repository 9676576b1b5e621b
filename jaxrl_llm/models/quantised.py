"""Matrices of decoder layers rounded to eight bits, with a scale for each output (products: `layers.products`).

A matrix W [K, N] is stored as values of int8 or float8 (E4M3) and scales f32[1, N], W ~ values * scale, with
scale = max |W| / 127 over the inputs of an output (448 for float8), and 1 where all are zero; as in Jet-RL
(2601.14243), but by output instead of by block of 128 x 128, so that the scale is applied after the product:
x W ~ (x values) * scale. A product reads the values themselves: no wide copy of the weights is in memory. Activations
are not rounded. The sampler keeps `Quantised` weights; the update, where it shall compute the same numbers, rounds its
own at each use (`StraightThrough`), with gradients as if W had not been rounded but was that matrix.

Frozen weights, to which adapters are trained (QLoRA), may be kept as `Quantised`, or in four bits (`normal_float`), in
the update too (`FROZEN`): gradients go through the matrices that they stand for, and nothing wide is kept for the
backward pass.

A kind of BLOCKS rounds both factors of each product, in the backward pass too: see `block_rounding`.

Embeddings, unembedding, norms, biases, routers of experts and adapters stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.block_rounding import BLOCKS, QuantisedBlocks, StraightThroughBlocks, quantise_blocks
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.eight_bits import KINDS, scale_of, to_values
from jaxrl_llm.models.mesh_axes import AnyMesh
from jaxrl_llm.models.normal_float import NormalFloat, as_floats, normal_float
from jaxrl_llm.models.parameters import PROJECTIONS, parameter_shapes
from jaxrl_llm.models.placement import split_spec
from jaxrl_llm.utils.errors import InputError, shown

NAMES = frozenset(name for name, weight in PROJECTIONS.items() if not {"one", "taps", "all_inputs"} & {*weight.axes})
NAMES -= {"router", "delta_rate", "delta_decay", "score"}


class Quantised(NamedTuple):
    """A matrix, or several: values of eight bits, and a scale for each output."""

    values: Array  # int8 or float8_e4m3fn, of the matrix's shape
    scale: Array  # f32, of length 1 along the axes of inputs

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix."""
        return self.values.shape


@partial(jax.tree_util.register_dataclass, data_fields=["weight", "scale"], meta_fields=["kind"])
@dataclass(frozen=True)
class StraightThrough:
    """A matrix that is rounded where it is used.

    The scale is found before, of the whole matrix: where it is used, devices may each have some of its inputs.
    """

    weight: Array
    scale: Array  # as in `Quantised`
    kind: str  # of KINDS

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix."""
        return self.weight.shape


Weight = Array | Quantised | QuantisedBlocks | NormalFloat | StraightThrough | StraightThroughBlocks


def is_rounded(w: Any) -> bool:
    """Whether a weight is kept rounded."""
    return isinstance(w, Quantised | QuantisedBlocks | NormalFloat)


def kind_of(dtype: Any, name: str = "weight_dtype") -> str | None:
    """The kind of KINDS, also by its dtype, or of BLOCKS that a setting names; None for None. InputError for others."""
    if dtype is None or (isinstance(dtype, str) and dtype in {*KINDS, *BLOCKS}):
        return dtype
    try:
        found = next((kind for kind, (values, _) in KINDS.items() if jnp.dtype(dtype) == values), None)
    except Exception:  # numpy has several for what is no dtype
        found = None
    if found is None:
        known = ", ".join([*KINDS, *BLOCKS])
        raise InputError(f"{name} is {shown(dtype)}, but must be {known}, or None for the policy's dtype")
    return found


def quantise(w: Array, kind: str, inputs: tuple[int, ...] = (-2,)) -> Quantised:
    """Round w, with a scale over its axes `inputs`. |w - values * scale| <= scale / 2 for int8.

    For float8, it is at most |w| / 16, or scale / 1024 where that is more.
    """
    return rounded(w, _scale_of(w, kind, inputs), kind)


def straight_through(w: Array, kind: str, inputs: tuple[int, ...] = (-2,)) -> StraightThrough:
    """As `quantise`, but the matrix is rounded where it is used, with gradients as if it was not."""
    return StraightThrough(w, _scale_of(jax.lax.stop_gradient(w), kind, inputs), kind)


def _scale_of(w: Array, kind: str, inputs: tuple[int, ...]) -> Array:
    return scale_of(jnp.max(jnp.abs(w), axis=inputs, keepdims=True), kind)


def rounded(w: Array, scale: Array, kind: str) -> Quantised:
    """Values of a kind of KINDS, of matrices w with these scales."""
    return Quantised(to_values(w.astype(jnp.float32) / scale, kind), scale)


def dequantised(q: Quantised, dtype: Any = jnp.float32) -> Array:
    """The matrix that the values and scales stand for."""
    return (q.values.astype(q.scale.dtype) * q.scale).astype(dtype)


def dense(w: Weight) -> Array:
    """The matrix itself; of one that is rounded where it is used with a gradient as if it was not.

    InputError for one that is rounded in blocks, whose products are not those of any matrix.
    """
    if isinstance(w, Quantised):
        return dequantised(w)
    if isinstance(w, NormalFloat):
        return as_floats(w)
    if isinstance(w, QuantisedBlocks | StraightThroughBlocks):
        raise InputError(f"{w.how.kind}_blocks rounds both factors of products: take weight_dtype {w.how.kind} here")
    if isinstance(w, StraightThrough):
        found = dequantised(rounded(w.weight, w.scale, w.kind), w.weight.dtype)
        return w.weight + jax.lax.stop_gradient(found - w.weight)
    return w


def quantised_layer(layer: dict[str, Any], kind: str | None) -> dict[str, Any]:
    """A layer's parameters, or those of all layers, with its projections rounded where they are not; None: as it is.

    kind: of KINDS or BLOCKS. InputError for blocks in a layer of experts, or of latent attention.
    """

    def round_one(name: str, w: Array, kind: str) -> Quantised | QuantisedBlocks:
        if kind in BLOCKS:
            return quantise_blocks(w, BLOCKS[kind], inputs_of(name))
        return quantise(w, kind, inputs_of(name))

    return _with_projections(layer, kind, round_one)


def straight_through_layer(layer: dict[str, Any], kind: str | None) -> dict[str, Any]:
    """A layer's parameters, whose projections are rounded where they are used, but for those that are already.

    kind, InputError: as of `quantised_layer`.
    """

    def mark(name: str, w: Array, kind: str) -> StraightThrough | StraightThroughBlocks:
        return StraightThroughBlocks(w, BLOCKS[kind]) if kind in BLOCKS else straight_through(w, kind, inputs_of(name))

    return _with_projections(layer, kind, mark)


def _with_projections(layer: dict[str, Any], kind: str | None, change: Callable[..., Any]) -> dict[str, Any]:
    """A layer, with change(name, w, kind) in place of each projection w that is not rounded."""
    if kind is None:
        return layer
    other = {"router": "experts", "key_out": "latent attention"}
    if kind in BLOCKS and (found := [what for name, what in other.items() if name in layer]):
        raise InputError(
            f"{kind} rounds the products of dense layers, but the model has {' and '.join(found)}: give weight_dtype "
            f"{BLOCKS[kind].kind}, or another model"
        )
    rounds = lambda name, w: name in NAMES and not is_rounded(w)  # noqa: E731
    return {name: change(name, w, kind) if rounds(name, w) else w for name, w in layer.items()}


# How a frozen matrix may be kept, by name: a function of it and its axes of inputs.
FROZEN: dict[str, Callable[..., Quantised | NormalFloat]] = {
    **{kind: partial(quantise, kind=kind) for kind in KINDS},
    "nf4": normal_float,
}


@partial(jax.jit, static_argnames=("kind", "name"))
def frozen_weight(name: str, w: Array, kind: str) -> Any:
    """A parameter as it is kept where it does not learn: a projection of layers rounded to a kind of FROZEN."""
    return FROZEN[kind](w, inputs=inputs_of(name)) if name in NAMES else w


def rounded_specs(name: str, w: Quantised | NormalFloat, config: ModelConfig, mesh: AnyMesh) -> Any:
    """PartitionSpecs of a rounded weight on a mesh, for `shard_map`: scales are split as what they are scales of.

    InputError where blocks of inputs would be cut. config: of the layer.
    """
    if isinstance(w, Quantised):
        return jax.tree.map(lambda x: split_spec(name, x.shape, config, mesh), w)
    spec = split_spec(name, w.shape, config, mesh)
    for axis, size in zip(spec, w.scale.shape, strict=False):
        if axis is not None and size % mesh.shape[axis]:
            raise InputError(
                f"{axis}={mesh.shape[axis]} of the mesh would cut blocks of 64 inputs of {name}, of which there are "
                f"{size}: give a number that divides them, or frozen_dtype int8"
            )
    return NormalFloat(spec, spec)  # type: ignore[arg-type]


def inputs_of(name: str) -> tuple[int, ...]:
    """The axes of a projection that are its inputs, counted from the last."""
    weight = PROJECTIONS[name]
    first = len(weight.stacked) - len(weight.axes)
    return tuple(range(first, first + weight.inputs))


def quantised_specs(config: ModelConfig, mesh: AnyMesh, specs: dict[str, PartitionSpec], kind: str) -> dict[str, Any]:
    """PartitionSpecs of a `quantised_layer`, given those of the layer: scales are split over outputs as values are, and
    those of blocks are whole on each device.

    config: of the layer; kind: of KINDS or BLOCKS.
    """
    shapes = parameter_shapes(config)

    def of_scale(name: str) -> PartitionSpec:
        shape = list(shapes["layers", name][1:])
        for axis in inputs_of(name):
            shape[axis] = 1
        return split_spec(name, shape, config, mesh)

    def split(name: str, spec: Any) -> Any:
        if kind in BLOCKS:
            return QuantisedBlocks(spec, PartitionSpec(), BLOCKS[kind])  # type: ignore[arg-type]
        return Quantised(spec, of_scale(name))  # type: ignore[arg-type]

    return {name: split(name, spec) if name in NAMES else spec for name, spec in specs.items()}


def cast(layer: dict[str, Any], dtype: Any) -> dict[str, Any]:
    """The arrays of floats of a layer in a dtype; rounded ones, and whole numbers, as they are.

    Weights of norms are at least in float32, in which norms are computed: else each decode step would convert them.
    """
    wide = jnp.promote_types(dtype, jnp.float32)

    def cast_one(path: Any, x: Any) -> Any:
        if is_rounded(x) or not jnp.issubdtype(x.dtype, jnp.floating):
            return x
        return x.astype(wide if str(path[-1].key).endswith("_norm") else dtype)

    found: dict[str, Any] = jax.tree_util.tree_map_with_path(cast_one, layer, is_leaf=is_rounded)
    return found
