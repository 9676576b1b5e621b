"""The weights of a model: those of one table that it has, with their shapes.

Initialisation, loading and saving (`io.layout`, `gguf`), sharding (`placement`), LoRA, weight decay and checks of
parameters read the table (`table.TABLE`). A new weight is a row there and a line in the decoder.

Logical axes: layers, experts, hidden, heads (of queries), kv_heads, head_size, inner (of the MLP), vocabulary,
labels; of adapters rank; of a critic's head units (hidden or its own) and values. `combine` joins parameters that are
frozen with those that learn. The package needs no JAX.
"""

from __future__ import annotations

from typing import Any

from jaxrl_llm.models.parameters.adapters import (
    ADAPTED,
    LORA_FACTORS,
    LORA_IN,
    LORA_OUT,
    LORA_SCALE,
    adapted_by_default,
    adapted_weights,
    adapter_axes,
)
from jaxrl_llm.models.parameters.shapes import (
    axis_sizes,
    head_shapes,
    head_weights,
    parameter_shapes,
    shape_of,
    weights,
)
from jaxrl_llm.models.parameters.table import TABLE
from jaxrl_llm.models.parameters.weight import Path

__all__ = [
    "ADAPTED", "AXES", "LORA_FACTORS", "LORA_IN", "LORA_OUT", "LORA_SCALE", "PROJECTIONS", "Params",
    "adapted_by_default", "adapted_weights", "adapter_axes", "axis_sizes", "combine", "head_shapes", "head_weights",
    "parameter_shapes", "put", "shape_of", "weights", "without_critic",
]  # fmt: skip

Params = dict[str, Any]  # a pytree of arrays
# Of weights and adapters, layers stacked; where only some models have experts, with that axis.
AXES = {weight.name: weight.axes for weight in TABLE} | {LORA_SCALE: ("layers",)}
for _weight in ADAPTED.values():
    AXES |= adapter_axes(_weight)
PROJECTIONS = {weight.name: weight for weight in TABLE if weight.inputs}


def put(tree: dict[str, Any], path: Path, value: Any) -> None:
    """Set the entry at a path in nested dictionaries."""
    *outer, last = path
    for name in outer:
        tree = tree.setdefault(name, {})
    tree[last] = value


def without_critic(params: Params) -> Params:
    """The policy's own parameters."""
    return {name: x for name, x in params.items() if name != "critic"}


def combine(frozen: Params | None, params: Params) -> Params:
    """The parameters of two parts: a deep union of dictionaries, and of tuples (of layers) entry by entry.

    The arrays are shared, not copied. frozen: None for none. Where both have an array, that of `params` is taken.
    """
    return params if frozen is None else _combine(frozen, params)


def _combine(a: Any, b: Any) -> Any:
    if isinstance(a, dict) and isinstance(b, dict):
        return {**a, **{name: _combine(a[name], x) if name in a else x for name, x in b.items()}}
    if isinstance(a, tuple) and isinstance(b, tuple):
        return tuple(_combine(x, y) for x, y in zip(a, b, strict=True))
    return b
