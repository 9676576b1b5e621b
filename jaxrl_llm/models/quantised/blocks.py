"""Matrices rounded to eight bits in blocks with a scale each, where both factors of products are (Jet-RL, 2601.14243).

Weights are rounded in blocks of 128 x 128, activations and gradients in groups of 128 along the axis that the product
sums over (`layers.block_products`). The sampler keeps `QuantisedBlocks`; the update, which shall compute the same
numbers, rounds its own weights at each use (`StraightThroughBlocks`).

A rounded activation makes a step where a plain one makes a difference: where sampler and update differ by float32's own
rounding, one number in some hundred thousand falls on the other side of a step, and then all later numbers of its token
and of those that see it differ a little, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.quantised.eight_bits import KINDS, scale_of, to_values


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
    those of `quantised.quantise`."""
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
    blocks = whole.reshape(*lead, -(-R // rows), rows, -(-C // columns), columns)
    scale = scale_of(jnp.max(blocks, axis=(-3, -1)), kind)
    # XLA divides by a scale in some programs and multiplies by its inverse in others. Ties, such as half of the largest
    # number in int8, would be rounded up in one and down in the other: here the inverse is explicit.
    wide = jnp.repeat(jnp.repeat(1 / scale, rows, axis=-2), columns, axis=-1)
    return to_values(a * wide[..., :R, :C], kind), scale
