"""Operations of matrix products in a function, counted on its jaxpr: loops as often as they run, recomputation too.

XLA counts the body of a loop once, and of a Pallas kernel nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any


def matrix_flops(jaxpr: Any, platform: str = "tpu") -> float:
    """Operations (2 for each multiplication and addition) of all devices together.

    jaxpr: a Jaxpr or ClosedJaxpr. platform: "tpu", "cuda" or "cpu", for functions that depend on it. A scan counts each
    of its turns, and a Pallas kernel each point of its grid, or what it declares where the grid or the turns of a loop
    are known on the device alone; a while loop counts once, and of a conditional the branch with most. What one device
    does in a `shard_map` is multiplied by the number of its devices.
    """
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(_of_equation(equation, platform) for equation in inner.eqns)


def _of_equation(equation: Any, platform: str) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        return _product(equation, contracted)
    if name == "ragged_dot_general":
        return _ragged(equation, params["ragged_dot_dimension_numbers"])
    if name == "cond":
        return max(matrix_flops(branch, platform) for branch in _possible(params, platform))
    times = 1.0
    if name == "scan":
        times = params["length"]
    elif name == "pallas_call":
        grid, declared = params["grid_mapping"].grid, params.get("cost_estimate")
        if declared is not None and not (all(isinstance(size, int) for size in grid) and _counted(params["jaxpr"])):
            return float(declared.flops)  # how many points the grid has, or turns a loop, is known on the device only
        times = math.prod(size for size in grid if isinstance(size, int))
    elif name == "shard_map":
        axes = params.get("newly_manual_axes") or params.get("manual_axes") or params["mesh"].axis_names
        times = math.prod(params["mesh"].shape[axis] for axis in axes)
    elif name == "while":
        return matrix_flops(params["body_jaxpr"], platform)
    return times * sum(matrix_flops(inner, platform) for inner in _inside(params))


def _counted(jaxpr: Any) -> bool:
    """Whether it is known how often its loops turn."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return all(
        equation.primitive.name != "while" and all(map(_counted, _inside(equation.params))) for equation in inner.eqns
    )


def _product(equation: Any, contracted: tuple[int, ...]) -> float:
    left, out = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    return 2.0 * math.prod(out) * math.prod(left[axis] for axis in contracted)


def _ragged(equation: Any, dims: Any) -> float:
    """Of a product in groups: each row meets one group's matrix, or adds to one."""
    (contracted, of_right), _ = dims.dot_dimension_numbers
    if not set(dims.lhs_ragged_dimensions) & set(contracted):
        return _product(equation, contracted)
    left, right = (x.aval.shape for x in equation.invars[:2])
    return 2.0 * math.prod(left) * math.prod(right) / math.prod(right[axis] for axis in of_right)


def _possible(params: dict[str, Any], platform: str) -> tuple[Any, ...]:
    """The branches of a conditional that the platform may take."""
    branches, platforms = params["branches"], params.get("branches_platforms")
    if platforms is None:
        return tuple(branches)
    own = [i for i, names in enumerate(platforms) if names is not None and platform in names]
    return (branches[(own or [platforms.index(None)])[0]],)


def _inside(params: dict[str, Any]) -> Iterator[Any]:
    """The jaxprs among an equation's parameters."""
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            if hasattr(getattr(one, "jaxpr", one), "eqns"):
                yield one
