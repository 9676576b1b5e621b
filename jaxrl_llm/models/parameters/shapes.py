"""Which weights a model has, and the sizes of their axes."""

from collections.abc import Sequence

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.parameters.table import HEAD, HEAD_MLP, TABLE
from jaxrl_llm.models.parameters.weight import Path, Shape, Weight


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
        "inputs": config.layer_inputs, "labels": len(config.score.labels) if config.score else 0,
        "all_inputs": config.layer_inputs * config.num_layers, "slots": config.sink_slots,
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


def head_weights(units: int) -> tuple[Weight, ...]:
    """The weights of a critic's head with an MLP of so many units; 0 is a linear head."""
    return (*HEAD_MLP, *HEAD) if units else HEAD


def head_shapes(config: ModelConfig, units: int, values: int) -> dict[str, Shape]:
    """Name -> shape of the weights of a critic's head that gives `values` values of a state."""
    width = units or config.hidden_size
    return {weight.name: shape_of(weight.axes, config, units=width, values=values) for weight in head_weights(units)}
