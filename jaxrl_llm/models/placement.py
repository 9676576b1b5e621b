"""How weights and hidden states are sharded over a mesh while a policy is computed.

A mesh has some of the axes "data", "fsdp" and "tensor". Rows are sharded over the first two, heads, inner units and the
vocabulary over the last. Over "fsdp", weights and their moments are stored in shards (`state_sharding`): those of a
layer are all-gathered when the layer runs, and again in the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.parameters import AXES

DATA, FSDP, TENSOR = "data", "fsdp", "tensor"
ROWS = (DATA, FSDP)

# Logical axis of a weight -> what is split over "tensor", as which query heads go with their key-value head. A weight
# has one such axis at most. What is added after an all-reduce (out_bias, down_bias), norms and the router have none.
SPLIT = {"heads": "heads", "kv_heads": "heads", "inner": "inner", "vocabulary": "vocabulary"}


def row_axes(mesh: Mesh | AbstractMesh) -> str | tuple[str, ...] | None:
    """The axes of the mesh over which rows are sharded, for a PartitionSpec."""
    names = tuple(name for name in ROWS if name in mesh.shape)
    return names[0] if len(names) == 1 else names or None


def row_shards(mesh: Mesh | AbstractMesh | None) -> int:
    """How many shards rows are split into; 1 without a mesh."""
    return 1 if mesh is None else math.prod(mesh.shape.get(name, 1) for name in ROWS)


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
    return PartitionSpec(*[None] * (ndim + axis), TENSOR)


class Placement(NamedTuple):
    """Sharding constraints on a layer's states and weights."""

    states: Callable[[jax.Array, bool], jax.Array]  # [N, L, D]: between layers or, if True, where projections read them
    weights: Callable[[dict[str, Any]], dict[str, Any]]  # of one layer


ANYWHERE = Placement(lambda x, whole: x, lambda layer: layer)


def placement(config: ModelConfig, mesh: Mesh | None) -> Placement:
    """Rows over "data" and "fsdp"; tokens over "tensor" between layers, so that the residuals of the backward pass are
    sharded (sequence parallelism, 2205.05198); weights split over "tensor" only. What does not divide is replicated.
    """
    if mesh is None:
        return ANYWHERE

    def put(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def states(x: jax.Array, whole: bool) -> jax.Array:
        rows = row_axes(mesh) if x.shape[0] % row_shards(mesh) == 0 else None
        split = TENSOR in mesh.shape and x.ndim > 2 and not whole and x.shape[1] % mesh.shape[TENSOR] == 0
        return put(x, PartitionSpec(rows, TENSOR) if split else PartitionSpec(rows))

    def weights(layer: dict[str, Any]) -> dict[str, Any]:
        size = mesh.shape.get(TENSOR, 1)
        return {name: put(x, split_spec(name, x.ndim, config, size)) for name, x in layer.items()}

    return Placement(states, weights)
