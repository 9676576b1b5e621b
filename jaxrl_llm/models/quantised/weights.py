"""Matrices rounded to eight bits, those that are rounded where they are used, and the arrays that both stand for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.models.quantised.blocks import BLOCKS, QuantisedBlocks, StraightThroughBlocks
from jaxrl_llm.models.quantised.eight_bits import KINDS, scale_of, to_values
from jaxrl_llm.models.quantised.normal_float import NormalFloat, as_floats
from jaxrl_llm.utils.errors import InputError, shown


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
