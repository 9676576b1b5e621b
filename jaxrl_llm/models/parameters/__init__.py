"""The weights of a model: those of one table that it has, with their shapes.

Initialisation, loading and saving (`io.layout`, `gguf`), sharding (`placement`), LoRA, weight decay and checks of
parameters read the table (`table.TABLE`). A new weight is a row there and a line in the decoder.

Logical axes: layers, experts, hidden, heads (of queries), kv_heads, head_size, inner (of the MLP), vocabulary,
labels; of adapters rank; of a critic's head units (hidden or its own) and values. `combine` joins parameters that are
frozen with those that learn. The package needs no JAX.
"""

from typing import Any

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.parameters.shapes import (
    axis_sizes,
    head_shapes,
    head_weights,
    parameter_shapes,
    shape_of,
    weights,
)
from jaxrl_llm.models.parameters.table import TABLE
from jaxrl_llm.models.parameters.weight import Path, Weight

LORA_IN, LORA_OUT, LORA_SCALE = "_lora_in", "_lora_out", "lora_scale"
LORA_FACTORS = "lora_factors"  # of several adapters side by side, see `models.by_row`


def adapted_weights(config: ModelConfig) -> dict[Path, Weight]:
    """The weights of a model that can have adapters, by path: projections of its layers and of their experts, and the
    matrices of embeddings, unless these are tied, so that an adapter of one could not be merged."""
    return {
        path: weight for path, weight in weights(config).items()
        if _is_adapted(weight) and ("layers" in weight.axes or not config.tie_embeddings)
    }  # fmt: skip


def _is_adapted(weight: Weight) -> bool:
    excluded = {"experts", "one", "taps"} & {*weight.axes[len(weight.stacked) :]}
    in_layers = bool(weight.inputs) and "layers" in weight.axes and not excluded
    return in_layers or weight.axes == ("vocabulary", "hidden")


def adapted_by_default(weight: Weight) -> bool:
    """Whether a weight that can have an adapter has one where no targets are named: experts and embeddings have not."""
    return weight.stacked == ("layers",)


def adapter_axes(weight: Weight) -> dict[str, tuple[str, ...]]:
    """Name -> axes of the two matrices of a weight's adapter, [inputs, rank] and [rank, outputs].

    The inputs of an embedding are tokens; the outputs of the unembedding, whose rows are tokens, are.
    """
    axes = weight.axes[::-1] if weight.name == "unembed" else weight.axes
    start = len(weight.stacked)
    end = start + (weight.inputs or 1)
    return {weight.name + LORA_IN: (*axes[:end], "rank"), weight.name + LORA_OUT: (*axes[:start], "rank", *axes[end:])}


ADAPTED = {weight.name: weight for weight in TABLE if _is_adapted(weight)}


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


def combine(frozen: Any, params: Any) -> Any:
    """The parameters of two parts: a deep union of dictionaries, and of tuples (of layers) entry by entry.

    The arrays are shared, not copied. frozen: None for none. Where both have an array, that of `params` is taken.
    """
    if isinstance(frozen, dict) and isinstance(params, dict):
        return {**frozen, **{name: combine(frozen[name], x) if name in frozen else x for name, x in params.items()}}
    if isinstance(frozen, tuple) and isinstance(params, tuple):
        return tuple(combine(x, y) for x, y in zip(frozen, params, strict=True))
    return params
