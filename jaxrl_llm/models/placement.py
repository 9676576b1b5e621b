"""How a policy lies on the devices of a mesh while it is computed: which axis of each weight is split, and the states.

The mesh has the axes "data", over which rows are spread, and "tensor", over which heads, inner units and the
vocabulary are. Weights may be kept in smaller pieces than they are used in (`distributed.fully_sharded`): those of a
layer are then put together over "data" when its turn comes, and again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.models.config import ModelConfig

AXIS = "tensor"

# Parameter -> what is split, and the axis that counts it, from the right: layer and expert axes stand on the left.
# What is added after an all-reduce (out_bias, down_bias), norms and the router are whole on every device.
SPLIT = {
    "query": ("heads", -2),
    "key": ("heads", -2),
    "value": ("heads", -2),
    "query_bias": ("heads", -2),
    "key_bias": ("heads", -2),
    "value_bias": ("heads", -2),
    "out": ("heads", -3),
    "gate": ("inner", -1),
    "up": ("inner", -1),
    "gate_bias": ("inner", -1),
    "up_bias": ("inner", -1),
    "down": ("inner", -2),
    # Of the two thin matrices of an adapter, the one with the axis that is split in the weight.
    "query_lora_out": ("heads", -2),
    "key_lora_out": ("heads", -2),
    "value_lora_out": ("heads", -2),
    "out_lora_in": ("heads", -3),
    "gate_lora_out": ("inner", -1),
    "up_lora_out": ("inner", -1),
    "down_lora_in": ("inner", -2),
    "embed": ("vocabulary", -2),
    "unembed": ("vocabulary", -2),
}


def split_counts(config: ModelConfig) -> dict[str, tuple[int, str]]:
    """What must divide for each kind of split, and its name. Query heads go with their key-value head."""
    return {
        "heads": (config.num_kv_heads, "key-value heads"),
        "inner": (config.intermediate_size, "inner units"),
        "vocabulary": (config.vocab_size, "tokens of the vocabulary"),
    }


def split_spec(name: str, ndim: int, config: ModelConfig, size: int) -> PartitionSpec:
    """The spec of one parameter with `ndim` axes, over `size` devices. Without trailing Nones, as jit returns them."""
    kind, axis = SPLIT.get(name, ("", 0))
    if size == 1 or not kind or split_counts(config)[kind][0] % size:
        return PartitionSpec()
    return PartitionSpec(*[None] * (ndim + axis), AXIS)


class Placement(NamedTuple):
    """Says where a layer's numbers lie, by constraints that the compiler keeps to."""

    states: Callable[[jax.Array, bool], jax.Array]  # [N, L, D]: between layers or, if True, where projections read them
    weights: Callable[[dict[str, Any]], dict[str, Any]]  # of one layer


ANYWHERE = Placement(lambda x, whole: x, lambda layer: layer)


def placement(config: ModelConfig, mesh: Mesh | None) -> Placement:
    """Rows over "data"; tokens over "tensor" between layers, so that all devices share what is kept for the backward
    pass (sequence parallelism, 2205.05198); weights split over "tensor" only. What does not divide is whole.
    """
    if mesh is None:
        return ANYWHERE

    def put(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def states(x: jax.Array, whole: bool) -> jax.Array:
        names = ("data",) if whole or x.ndim == 2 else ("data", AXIS)
        fits = [name in mesh.shape and x.shape[axis] % mesh.shape[name] == 0 for axis, name in enumerate(names)]
        return put(x, PartitionSpec(*(name if fit else None for name, fit in zip(names, fits, strict=True))))

    def weights(layer: dict[str, Any]) -> dict[str, Any]:
        size = mesh.shape.get(AXIS, 1)
        return {name: put(x, split_spec(name, x.ndim, config, size)) for name, x in layer.items()}

    return Placement(states, weights)
