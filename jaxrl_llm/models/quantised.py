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

A kind of BLOCKS rounds both factors of each product, in the backward pass too (`layers.block_products`): weights in
blocks of 128 x 128 with a scale each, as Jet-RL has it, and what they meet in groups of 128.

Embeddings, unembedding, norms, biases, routers of experts and adapters stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.mesh_axes import AnyMesh
from jaxrl_llm.models.normal_float import NormalFloat, as_floats, normal_float
from jaxrl_llm.models.parameters import PROJECTIONS, parameter_shapes
from jaxrl_llm.models.placement import split_spec
from jaxrl_llm.utils.errors import InputError, shown

# Name -> dtype of the values, and the greatest of them.
KINDS: dict[str, tuple[Any, float]] = {"int8": (jnp.int8, 127.0), "float8": (jnp.float8_e4m3fn, 448.0)}
NAMES = frozenset(name for name, weight in PROJECTIONS.items() if not {"one", "taps", "all_inputs"} & {*weight.axes})
NAMES -= {"router", "delta_rate", "delta_decay", "score"}
SMALLEST = 1e-30  # what is below is 0


@dataclass(frozen=True)
class BlockRounding:
    """How both factors of a product are rounded: weights in blocks of size x size, with a scale each; activations and
    gradients in groups of `size` numbers along the axis that the product sums over."""

    kind: str  # of KINDS
    size: int = 128


BLOCKS = {"float8_blocks": BlockRounding("float8")}


class Quantised(NamedTuple):
    """A matrix, or several: values of eight bits, and a scale for each output."""

    values: Array  # int8 or float8_e4m3fn, of the matrix's shape
    scale: Array  # f32, of length 1 along the axes of inputs

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix."""
        return self.values.shape


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=["how"])
@dataclass(frozen=True)
class QuantisedBlocks:
    """A matrix, or several, rounded in blocks, whose products round the other factor too. They have no gradients."""

    values: Array  # int8 or float8_e4m3fn, of the matrix's shape
    scale: Array  # f32[..., blocks of inputs, blocks of outputs]
    how: BlockRounding

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix."""
        return self.values.shape


@partial(jax.tree_util.register_dataclass, data_fields=["weight", "scale"], meta_fields=["how"])
@dataclass(frozen=True)
class StraightThrough:
    """A matrix that is rounded where it is used.

    The scale is found before, of the whole matrix: where it is used, devices may each have some of its inputs.
    """

    weight: Array
    scale: Array  # as in `Quantised`, or `QuantisedBlocks`
    how: str | BlockRounding  # of KINDS

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix."""
        return self.weight.shape


Weight = Array | Quantised | QuantisedBlocks | NormalFloat | StraightThrough


def is_rounded(w: Any) -> TypeGuard[Quantised | QuantisedBlocks | NormalFloat]:
    """Whether a weight is kept rounded."""
    return isinstance(w, Quantised | QuantisedBlocks | NormalFloat)


def kind_of(dtype: Any, name: str = "weight_dtype") -> str | None:
    """The kind of KINDS or BLOCKS that a setting names, of KINDS also by its dtype; None for None.

    InputError for others.
    """
    if dtype is None or (isinstance(dtype, str) and dtype in {**KINDS, **BLOCKS}):
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


def quantise_blocks(w: Array, how: BlockRounding, inputs: tuple[int, ...] = (-2,)) -> QuantisedBlocks:
    """Round w in blocks of inputs x outputs, the axes after `inputs`. Errors are bounded as in `quantise`."""
    matrix = _as_matrix(w, inputs)
    scale = _scale_of_blocks(matrix, how)
    return QuantisedBlocks(values_of_blocks(matrix, scale, how).reshape(w.shape), scale, how)


def straight_through(w: Array, how: str | BlockRounding, inputs: tuple[int, ...] = (-2,)) -> StraightThrough:
    """As `quantise` or `quantise_blocks`, but rounded where it is used, with gradients as if it was not."""
    fixed = jax.lax.stop_gradient(w)
    if isinstance(how, BlockRounding):
        return StraightThrough(w, _scale_of_blocks(_as_matrix(fixed, inputs), how), how)
    return StraightThrough(w, _scale_of(fixed, how, inputs), how)


def _scale_of(w: Array, kind: str, inputs: tuple[int, ...]) -> Array:
    largest = jnp.max(jnp.abs(w), axis=inputs, keepdims=True).astype(jnp.float32)
    return jnp.where(largest > SMALLEST, largest / KINDS[kind][1], 1.0)


def _as_matrix(w: Array, inputs: tuple[int, ...]) -> Array:
    """w [..., K, N], whose axes of inputs, and of outputs after them, may be several."""
    first, last = w.ndim + inputs[0], w.ndim + inputs[-1] + 1
    return w.reshape(*w.shape[:first], math.prod(w.shape[first:last]), math.prod(w.shape[last:]))


def _scale_of_blocks(w: Array, how: BlockRounding) -> Array:
    """Scales f32[..., ceil(K / size), ceil(N / size)] of a matrix w [..., K, N]."""
    *lead, K, N = w.shape
    more = [(0, 0)] * len(lead) + [(0, -n % how.size) for n in (K, N)]
    whole = jnp.pad(jnp.abs(as_stored(w)), more)
    blocks = whole.reshape(*lead, -(-K // how.size), how.size, -(-N // how.size), how.size)
    return to_scale(jnp.max(blocks, axis=(-3, -1)), how.kind)


def values_of_blocks(w: Array, scale: Array, how: BlockRounding) -> Array:
    """Values of matrices w [..., K, N] with these scales of blocks."""
    wide = jnp.repeat(jnp.repeat(inverse(scale), how.size, axis=-2), how.size, axis=-1)
    return to_values(as_stored(w) * wide[..., : w.shape[-2], : w.shape[-1]], how.kind)


def as_stored(w: Array) -> Array:
    """f32, of what w is in its dtype: XLA may leave out a cast to bfloat16 of numbers that are cast back."""
    bits = jnp.finfo(w.dtype)
    return jax.lax.reduce_precision(w.astype(jnp.float32), min(bits.nexp, 8), min(bits.nmant, 23))


def inverse(scale: Array) -> Array:
    """What numbers are multiplied by before they are rounded.

    XLA may divide in one program and multiply in another. Ties, such as half the largest number of a block in bfloat16,
    would then be rounded apart in sampler and update: the barriers leave nothing to choose.
    """
    return jax.lax.optimization_barrier(1 / jax.lax.optimization_barrier(scale))


def to_scale(largest: Array, kind: str) -> Array:
    """The scale f32 with which the largest of some numbers is the greatest value of the kind; 1 where all are 0."""
    share = np.float32(1 / KINDS[kind][1])  # XLA divides by constants in some programs, and multiplies in others
    return jnp.where(largest > SMALLEST, largest.astype(jnp.float32) * share, 1.0)


def to_values(scaled: Array, kind: str) -> Array:
    """Numbers f32 that are scaled to the range of a kind of KINDS, as values of it."""
    dtype, most = KINDS[kind]
    scaled = jnp.clip(scaled, -most, most)
    return (jnp.round(scaled) if kind == "int8" else scaled).astype(dtype)


def rounded(w: Array, scale: Array, kind: str) -> Quantised:
    """Matrices w with these scales, in a kind of KINDS."""
    return Quantised(to_values(w.astype(jnp.float32) / scale, kind), scale)


def dequantised(q: Quantised, dtype: Any = jnp.float32) -> Array:
    """The matrix that the values and scales stand for."""
    return (q.values.astype(q.scale.dtype) * q.scale).astype(dtype)


def dense(w: Weight) -> Array:
    """The matrix itself; of one that is rounded where it is used with a gradient as if it was not."""
    if isinstance(w, Quantised):
        return dequantised(w)
    if isinstance(w, NormalFloat):
        return as_floats(w)
    if isinstance(w, QuantisedBlocks | StraightThrough) and isinstance(w.how, BlockRounding):
        raise InputError("weights that are rounded in blocks have products only: take a kind without blocks")
    if isinstance(w, StraightThrough):
        found = dequantised(rounded(w.weight, w.scale, w.how), w.weight.dtype)
        return w.weight + jax.lax.stop_gradient(found - w.weight)
    return w


def quantised_layer(layer: dict[str, Any], kind: str | None) -> dict[str, Any]:
    """A layer's parameters, or those of all layers, with its projections rounded where they are not; None: as it is.

    kind: of KINDS or BLOCKS. InputError for blocks in a layer of experts, or of latent attention.
    """
    if kind is None:
        return layer
    _check_blocks(layer, kind)
    round_one = partial(quantise_blocks, how=BLOCKS[kind]) if kind in BLOCKS else partial(quantise, kind=kind)
    rounds = lambda name, w: name in NAMES and not is_rounded(w)  # noqa: E731
    return {name: round_one(w, inputs=inputs_of(name)) if rounds(name, w) else w for name, w in layer.items()}


def _check_blocks(layer: dict[str, Any], kind: str) -> None:
    other = {"router": "experts", "key_out": "latent attention"}
    if kind in BLOCKS and (found := [what for name, what in other.items() if name in layer]):
        raise InputError(
            f"{kind} rounds the products of dense layers, but the model has {' and '.join(found)}: give weight_dtype "
            f"{BLOCKS[kind].kind}, or another model"
        )


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
    those of blocks are not split.

    config: of the layer.
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


def straight_through_layer(layer: dict[str, Any], kind: str | None) -> dict[str, Any]:
    """A layer's parameters, whose projections are rounded where they are used, but for those that are already.

    InputError as of `quantised_layer`.
    """
    if kind is None:
        return layer
    _check_blocks(layer, kind)
    rounds = lambda name, w: name in NAMES and not is_rounded(w)  # noqa: E731
    how = BLOCKS.get(kind, kind)
    own = {name: straight_through(w, how, inputs_of(name)) for name, w in layer.items() if rounds(name, w)}
    return {**layer, **own}


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
