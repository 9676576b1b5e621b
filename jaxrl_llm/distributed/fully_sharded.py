"""Weights, moments and master copies in shards over the mesh axis "fsdp", for models that do not fit on one device.

Each array is split over "tensor" and "expert" as its parameter is (`sharding.parameter_specs`), and another of its axes
over "fsdp" (ZeRO-3). A layer's weights are all-gathered over "fsdp" when it runs, where the policy has the mesh
(`models.placement`).
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.mesh_axes import FSDP
from jaxrl_llm.models.placement import split_spec


def fully_sharded(tree: Any, config: ModelConfig, mesh: Mesh | AbstractMesh) -> Any:
    """A NamedSharding for each array of a pytree (or its shape): parameters, adapters, or a state of training.

    Moments and master copies are sharded as their parameter: over "tensor" and "expert" as `split_spec` says, and over
    "fsdp" along the longest other axis that it divides, but not the axis of layers. Vectors and counters are
    replicated, and so is everything on a mesh without these axes.
    """
    shards = mesh.shape.get(FSDP, 1)

    def place(path: Any, x: Any) -> NamedSharding:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        if not names:
            return NamedSharding(mesh, PartitionSpec())
        # Some weights of a critic's head have the names of a decoder's.
        spec = [] if "head" in names[:-1] else list(split_spec(names[-1], x.shape, config, mesh))
        spec += [None] * (x.ndim - len(spec))
        first = 1 if "layers" in names and x.ndim > 2 else 0
        free = [axis for axis in range(first, x.ndim) if spec[axis] is None and x.shape[axis] % shards == 0]
        if shards > 1 and x.ndim > 1 and free:
            spec[max(free, key=lambda axis: x.shape[axis])] = FSDP
        while spec and spec[-1] is None:  # as jit returns them
            spec.pop()
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(place, tree)
