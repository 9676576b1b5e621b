"""How weights and hidden states are sharded over a mesh while a policy is computed.

The mesh has the axes "data", over which rows are sharded, and "tensor", over which heads, inner units and the
vocabulary are. Weights may be stored in smaller shards than they are used in (`distributed.fully_sharded`): those of a
layer are then all-gathered over "data" when the layer runs, and again in the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.parameters import AXES

AXIS = "tensor"

# Logical axis of a weight -> what is split over "tensor", as which query heads go with their key-value head. A weight
# has one such axis at most. What is added after an all-reduce (out_bias, down_bias), norms and the router have none.
SPLIT = {"heads": "heads", "kv_heads": "heads", "inner": "inner", "vocabulary": "vocabulary"}


def split_counts(config: ModelConfig) -> dict[str, tuple[int, str]]:
    """For each kind of split, the number that must divide, and what it counts."""
    return {
        "heads": (config.num_kv_heads, "key-value heads"),
        "inner": (config.intermediate_size, "inner units"),
        "vocabulary": (config.vocab_size, "tokens of the vocabulary"),
    }


def split_axis(name: str) -> tuple[str, int]:
    """What of a parameter or adapter is split, and its axis, counted from the right; ("", 0) where nothing is."""
    axes = AXES.get(name, ())
    return next(((SPLIT[axis], at - len(axes)) for at, axis in enumerate(axes) if axis in SPLIT), ("", 0))


def split_spec(name: str, ndim: int, config: ModelConfig, size: int) -> PartitionSpec:
    """The spec of one parameter with `ndim` axes, over `size` devices. Without trailing Nones, as jit returns them."""
    kind, axis = split_axis(name)
    if size == 1 or not kind or split_counts(config)[kind][0] % size:
        return PartitionSpec()
    return PartitionSpec(*[None] * (ndim + axis), AXIS)


class Placement(NamedTuple):
    """Sharding constraints on a layer's states and weights."""

    states: Callable[[jax.Array, bool], jax.Array]  # [N, L, D]: between layers or, if True, where projections read them
    weights: Callable[[dict[str, Any]], dict[str, Any]]  # of one layer


ANYWHERE = Placement(lambda x, whole: x, lambda layer: layer)


def placement(config: ModelConfig, mesh: Mesh | None) -> Placement:
    """Rows over "data"; tokens over "tensor" between layers, so that the residuals of the backward pass are
    sharded (sequence parallelism, 2205.05198); weights split over "tensor" only. What does not divide is replicated.
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
