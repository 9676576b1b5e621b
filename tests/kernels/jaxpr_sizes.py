"""The sizes of arrays in a program."""

from __future__ import annotations

from typing import Any

import jax


def sizes(jaxpr: Any) -> list[int]:
    """Number of elements of every result in a jaxpr and the jaxprs inside it."""
    found = []
    for equation in jaxpr.eqns:
        found += [variable.aval.size for variable in equation.outvars]
        for leaf in jax.tree.leaves(equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
            inner = getattr(leaf, "jaxpr", leaf)
            found += sizes(inner) if hasattr(inner, "eqns") else []
    return found
