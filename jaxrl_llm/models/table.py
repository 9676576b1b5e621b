"""Parameters as a table, where their arrays would fill the screen."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax


class ParameterTable(NamedTuple):
    """A row for each array: its path, shape, data type, number of parameters and bytes; prints as a table."""

    rows: tuple[tuple[str, tuple[int, ...], str, int, int], ...]

    @property
    def parameters(self) -> int:
        """The parameters of all arrays."""
        return sum(row[3] for row in self.rows)

    @property
    def bytes(self) -> int:
        """The bytes of all arrays, on all devices together where they are sharded."""
        return sum(row[4] for row in self.rows)

    def __repr__(self) -> str:
        shown = [(name, str(shape), dtype, f"{n:,}", f"{size / 1e6:,.1f}") for name, shape, dtype, n, size in self.rows]
        shown.append(("all", "", "", f"{self.parameters:,}", f"{self.bytes / 1e6:,.1f}"))
        rows = [("array", "shape", "dtype", "parameters", "MB"), *shown]
        widths = [max(len(row[column]) for row in rows) for column in range(5)]
        aligned = [
            [cell.ljust(width) if column < 3 else cell.rjust(width) for column, (cell, width) in enumerate(pairs)]
            for pairs in (zip(row, widths, strict=True) for row in rows)
        ]
        return "\n".join("  ".join(row).rstrip() for row in aligned)


def parameter_table(params: Any) -> ParameterTable:
    """A table of the arrays of a pytree: of parameters, gradients, moments, or their `jax.ShapeDtypeStruct`s.

    >>> parameter_table({"embed": jax.ShapeDtypeStruct((1000, 64), "float32")})
    array  shape       dtype    parameters   MB
    embed  (1000, 64)  float32      64,000  0.3
    all                             64,000  0.3
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return ParameterTable(
        tuple(
            (
                jax.tree_util.keystr(path, simple=True, separator="/"),
                tuple(leaf.shape),
                str(leaf.dtype),
                math.prod(leaf.shape),
                math.prod(leaf.shape) * leaf.dtype.itemsize,
            )
            for path, leaf in leaves
        )
    )
