"""NormalFloat: matrices of four bits a number, in blocks with a scale of their own (NF4 of QLoRA, arXiv 2305.14314).

The 16 levels are quantiles of a normal distribution, so that numbers of one are spread over them evenly, with 0 and the
ends -1 and 1 among them (QLoRA, section 3 and appendix E). A block is up to 64 inputs of an output, next to each other;
its scale is its largest absolute number in bfloat16: 4.25 bits a number together.
"""

import itertools
import math
from statistics import NormalDist
from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.utils.errors import InputError

BLOCK = 64
_OUTERMOST = 0.9677083  # the probability below the last quantile, in the authors' code


class NormalFloat(NamedTuple):
    """A matrix, or several: the number of the level of each entry, two in a byte, and a scale for each block."""

    levels: Array  # uint8, half as many along the last axis of inputs: byte j of a block has entries j, j + size / 2
    scale: Array  # bfloat16, with blocks in place of that axis

    @property
    def axis(self) -> int:
        """The last axis of inputs."""
        pairs = zip(self.levels.shape, self.scale.shape, strict=True)
        return next(at for at, (entries, blocks) in enumerate(pairs) if entries != blocks)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the matrix."""
        axis = self.axis
        return tuple(size * (1 + (at == axis)) for at, size in enumerate(self.levels.shape))


def _quantiles() -> tuple[float, ...]:
    """The levels in order: 8 above 0, 7 below, and 0."""
    quantile = NormalDist().inv_cdf

    def half(count: int) -> list[float]:
        return [quantile(_OUTERMOST + (0.5 - _OUTERMOST) * place / count) for place in range(count)]

    most = quantile(_OUTERMOST)
    return tuple(x / most for x in sorted([*half(8), *(-x for x in half(7)), 0.0]))


LEVELS = _quantiles()


def normal_float(w: Array, inputs: tuple[int, ...] = (-2,)) -> NormalFloat:
    """Round w to the nearest levels. inputs: its axes of inputs, counted from the last; blocks are along the last.

    A block has 64 inputs, or the greatest common divisor of that and their number. |w - rounded| is at most 0.152 of
    the block's largest number, half the widest gap between levels, but for the rounding of scales. InputError where
    blocks would be of fewer than 4.
    """
    axis = w.ndim + inputs[-1]
    size = math.gcd(w.shape[axis], BLOCK)
    if size < 4:
        raise InputError(f"{w.shape[axis]} inputs have no blocks of at least 4, which nf4 needs: take int8")
    blocks = w.astype(jnp.float32).reshape(*w.shape[:axis], -1, size, *w.shape[axis + 1 :])
    largest = jnp.max(jnp.abs(blocks), axis=axis + 1)
    scale = jnp.where(largest > 0, largest, 1.0).astype(jnp.bfloat16)
    scaled = blocks / jnp.expand_dims(scale, axis + 1).astype(jnp.float32)
    above = [(scaled > (low + high) / 2).astype(jnp.uint8) for low, high in itertools.pairwise(LEVELS)]
    first, second = jnp.split(sum(above[1:], above[0]), 2, axis=axis + 1)
    return NormalFloat((first | second << 4).reshape(*w.shape[:axis], -1, *w.shape[axis + 1 :]), scale)


def as_floats(q: NormalFloat, dtype: Any = jnp.float32) -> Array:
    """The matrix that the levels and scales stand for."""
    axis, shape = q.axis, q.shape
    blocks = q.levels.reshape(*shape[:axis], q.scale.shape[axis], -1, *shape[axis + 1 :])
    numbers = jnp.concatenate([blocks & 15, blocks >> 4], axis=axis + 1)
    scale = jnp.expand_dims(q.scale, axis + 1).astype(jnp.float32)
    return (_level(numbers) * scale).astype(dtype).reshape(shape)


def _level(number: Array) -> Array:
    """The level of each number uint8, f32: chosen by one bit after the other, which takes no table in memory."""
    found = list[Any](LEVELS)
    for place in range(4):
        on = (number >> place & 1).astype(bool)
        found = [jnp.where(on, odd, even) for even, odd in zip(found[::2], found[1::2], strict=True)]
    return found[0].astype(jnp.float32)
