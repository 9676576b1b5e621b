"""The weights of a model: those of one table that it has, with their shapes.

Initialisation, loading and saving (`io.layout`, `gguf`), sharding (`placement`), LoRA, weight decay and checks of
parameters read the table (`table.TABLE`). A new weight is a row there and a line in the decoder.

Logical axes: layers, experts, hidden, heads (of queries), kv_heads, head_size, inner (of the MLP), vocabulary; of
adapters rank; of a critic's head units (hidden or its own) and values. `combine` joins parameters that are frozen with
those that learn. The module needs no JAX.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxrl_llm.models.parameters.table import HEAD, HEAD_MLP, TABLE
from jaxrl_llm.models.parameters.weight import Path, Shape, Weight

if TYPE_CHECKING:
    from jaxrl_llm.models.config import ModelConfig

Params = dict[str, Any]  # a pytree of arrays
LORA_IN, LORA_OUT, LORA_SCALE = "_lora_in", "_lora_out", "lora_scale"


def weights(config: ModelConfig) -> dict[Path, Weight]:
    """The weights of a model by their paths in the parameters, with their layers and shapes."""
    found = [
        weight._replace(shape=shape_of(weight.axes, config)) for weight in TABLE
        if "layers" not in weight.axes and weight.when(config)
    ]  # fmt: skip
    for number, kind in enumerate(config.each_kind):
        layers, name = config.layers_of(number), config.kinds[number].name if config.kinds else ""
        found += [
            weight._replace(kind=name, layers=layers, shape=shape_of(weight.axes, kind, layers=len(layers)))
            for weight in TABLE if "layers" in weight.axes and weight.when(kind)
        ]  # fmt: skip
    return {weight.path: weight for weight in found}


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """The size of each logical axis of a policy, or of one kind of layer."""
    latent, delta = config.latent, config.delta
    sizes = {
        "layers": config.num_layers, "experts": config.num_experts, "hidden": config.hidden_size,
        "heads": config.num_heads, "kv_heads": config.num_kv_heads, "head_size": config.head_dim,
        "value_size": latent.value if latent else config.head_dim, "inner": config.intermediate_size,
        "vocabulary": config.vocab_size, "choices": config.num_experts, "shared": config.shared_size, "one": 1,
        "inputs": config.layer_inputs,
        "all_inputs": config.layer_inputs * config.num_layers,
    }  # fmt: skip
    if delta:
        sizes |= {
            "query_heads": delta.keys, "query_size": delta.key, "state_heads": delta.values, "state_size": delta.value,
        }  # fmt: skip
    sizes |= {"taps": delta.taps if delta else config.convolution, "channels": config.hidden_size}
    if latent:
        sizes |= {"kv_rank": latent.rank, "latent": latent.rank + latent.rotated, "plain": latent.plain}
        sizes["query_rank"] = latent.query_rank
    return sizes


def shape_of(axes: Sequence[str], config: ModelConfig, **others: int) -> Shape:
    """The shape of an array with these logical axes; others: sizes of axes that are not the policy's, such as rank."""
    sizes = axis_sizes(config) | others
    return tuple(sizes[axis] for axis in axes)


def parameter_shapes(config: ModelConfig) -> dict[Path, Shape]:
    """Path -> shape of the parameter, layers stacked."""
    return {path: weight.shape for path, weight in weights(config).items()}


def put(tree: dict[str, Any], path: Path, value: Any) -> None:
    """Set the entry at a path in nested dictionaries."""
    *outer, last = path
    for name in outer:
        tree = tree.setdefault(name, {})
    tree[last] = value


def head_weights(units: int) -> tuple[Weight, ...]:
    """The weights of a critic's head with an MLP of so many units; 0 is a linear head."""
    return (*HEAD_MLP, *HEAD) if units else HEAD


def head_shapes(config: ModelConfig, units: int, values: int) -> dict[str, Shape]:
    """Name -> shape of the weights of a critic's head that gives `values` values of a state."""
    width = units or config.hidden_size
    return {weight.name: shape_of(weight.axes, config, units=width, values=values) for weight in head_weights(units)}


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
    return {
        weight.name + LORA_IN: (*axes[:end], "rank"),
        weight.name + LORA_OUT: (*axes[:start], "rank", *axes[end:]),
    }


ADAPTED = {weight.name: weight for weight in TABLE if _is_adapted(weight)}
# Of weights and adapters, layers stacked; where only some models have experts, with that axis.
AXES = {weight.name: weight.axes for weight in TABLE} | {LORA_SCALE: ("layers",)}
for _weight in ADAPTED.values():
    AXES |= adapter_axes(_weight)
PROJECTIONS = {weight.name: weight for weight in TABLE if weight.inputs}


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
