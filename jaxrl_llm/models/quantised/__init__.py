"""Weights of decoder layers rounded to eight bits, with a scale for each output (products: `layers.products`).

A matrix W [K, N] is stored as values of int8 or float8 (E4M3) and scales f32[1, N], W ~ values * scale, with
scale = max |W| / 127 over the inputs of an output (448 for float8), and 1 where all are zero; as in Jet-RL
(2601.14243), but by output instead of by block of 128 x 128, so that the scale is applied after the product:
x W ~ (x values) * scale. A product reads the values themselves: no wide copy of the weights is in memory. Activations
are not rounded. The sampler keeps `Quantised` weights; the update, where it shall compute the same numbers, rounds its
own at each use (`StraightThrough`), with gradients as if W had not been rounded but was that matrix.

Frozen weights, to which adapters are trained (QLoRA), may be kept as `Quantised`, or in four bits (`normal_float`), in
the update too (`FROZEN`): gradients go through the matrices that they stand for, and nothing wide is kept for the
backward pass.

A kind of BLOCKS rounds both factors of each product, in the backward pass too (Jet-RL): weights in blocks of 128 x 128,
activations and gradients in groups of 128 along the axis that the product sums over (`layers.products`). The sampler
keeps `QuantisedBlocks`; the update, which shall compute the same numbers, rounds its own weights at each use
(`StraightThroughBlocks`). A rounded activation makes a step where a plain one makes a difference: where sampler and
update differ by float32's own rounding, one number in some hundred thousand falls on the other side of a step, and then
all later numbers of its token and of those that see it differ a little, too.

Embeddings, unembedding, norms, biases, routers of experts and adapters stay as they are.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.quantised.normal_float import NormalFloat, as_floats
from jaxrl_llm.utils.errors import InputError, shown

# Name -> dtype of the values, and the greatest of them.
KINDS: dict[str, tuple[Any, float]] = {"int8": (jnp.int8, 127.0), "float8": (jnp.float8_e4m3fn, 448.0)}
SMALLEST = 1e-30  # what is below is 0


def scale_of(largest: Array, kind: str) -> Array:
    """The scales f32 by which the largest numbers become the greatest value of a kind of KINDS; 1 where they are 0."""
    # XLA divides by a constant in some programs and multiplies by its inverse in others: ties would be rounded up in
    # one and down in the other.
    return jnp.where(largest > SMALLEST, largest.astype(jnp.float32) * np.float32(1 / KINDS[kind][1]), 1.0)


def to_values(scaled: Array, kind: str) -> Array:
    """Numbers f32, scaled to the range of a kind of KINDS, as the nearest values of it."""
    dtype, most = KINDS[kind]
    scaled = jnp.clip(scaled, -most, most)
    return (jnp.round(scaled) if kind == "int8" else scaled).astype(dtype)


@dataclass(frozen=True)
class BlockRounding:
    """Rounding of both factors of a product to `kind`: weights in blocks of size x size, the others in groups."""

    kind: str  # of KINDS
    size: int = 128


BLOCKS = {f"{kind}_blocks": BlockRounding(kind) for kind in KINDS}


@partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=["how"])
@dataclass(frozen=True)
class QuantisedBlocks:
    """A matrix, or several, rounded in blocks, whose products round the other factor too. They have no gradients."""

    values: Array  # of eight bits, of the matrix's shape
    scale: Array  # f32[..., blocks of inputs, blocks of outputs]
    how: BlockRounding

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix."""
        return self.values.shape


@partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["how"])
@dataclass(frozen=True)
class StraightThroughBlocks:
    """A matrix that is rounded in blocks where it is used, with gradients as if it was not."""

    weight: Array
    how: BlockRounding

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix."""
        return self.weight.shape


def quantise_blocks(w: Array, how: BlockRounding, inputs: tuple[int, ...] = (-2,)) -> QuantisedBlocks:
    """Round w in blocks of inputs x outputs, the axes after `inputs`; both may be several axes. Errors are bounded as
    those of `quantise`."""
    first, last = w.ndim + inputs[0], w.ndim + inputs[-1] + 1
    matrix = w.reshape(*w.shape[:first], math.prod(w.shape[first:last]), math.prod(w.shape[last:]))
    values, scale = in_blocks(matrix, (how.size, how.size), how.kind)
    return QuantisedBlocks(values.reshape(w.shape), scale, how)


def in_blocks(a: Array, size: tuple[int, int], kind: str) -> tuple[Array, Array]:
    """Round matrices a [..., R, C] to a kind of KINDS in blocks of a size; the last ones may be smaller.

    Returns values of the shape of a, and scales f32[..., blocks of rows, blocks of columns].
    """
    *lead, R, C = a.shape
    (rows, columns), a = size, a.astype(jnp.float32)
    whole = jnp.pad(jnp.abs(a), [(0, 0)] * len(lead) + [(0, -R % rows), (0, -C % columns)])
    scale = scale_of(jnp.max(whole.reshape(*lead, -(-R // rows), rows, -(-C // columns), columns), axis=(-3, -1)), kind)
    # XLA divides by a scale in some programs and multiplies by its inverse in others. Ties, such as half of the largest
    # number in int8, would be rounded up in one and down in the other: here the inverse is explicit.
    return to_values(a * jnp.repeat(jnp.repeat(1 / scale, rows, axis=-2), columns, axis=-1)[..., :R, :C], kind), scale


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
