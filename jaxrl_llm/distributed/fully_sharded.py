"""Weights, moments and master copies in shards over the mesh axis "fsdp", for models that do not fit on one device.

Each array is split over "tensor" and "expert" as its parameter is (`sharding.parameter_specs`), and another of its axes
over "fsdp" (ZeRO-3). A layer's weights are all-gathered over "fsdp" when it runs, where the policy has the mesh
(`models.placement`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.distributed.sharding import check_mesh
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.mesh_axes import stored_spec


def shardings_over(mesh: Mesh | None, sampler: Mesh | None = None) -> Callable[[ModelConfig, Any], Any] | None:
    """How a model's parameters are spread over a mesh as they are read, see `load_policy`; None on a single device.

    sampler: the same devices as tokens are sampled on them. The function raises InputError where either does not divide
    the model.
    """
    if mesh is None or mesh.size == 1:
        return None

    def shardings(config: ModelConfig, shapes: Any) -> Any:
        check_mesh(config, mesh)
        if sampler is not None:
            check_mesh(config, sampler, "the sampling mesh")
        return fully_sharded(shapes, config, mesh)

    return shardings


def fully_sharded(tree: Any, config: ModelConfig, mesh: Mesh | AbstractMesh) -> Any:
    """A NamedSharding for each array of a pytree (or its shape): parameters, adapters, or a state of training.

    Moments and master copies are sharded as their parameter: over "tensor" and "expert" as `split_spec` says, and over
    "fsdp" along the longest other axis that it divides, but not the axis of layers. Vectors and counters are
    replicated, and so is everything on a mesh without these axes.
    """

    def place(path: Any, x: Any) -> NamedSharding:
        names = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
        if not names:
            return NamedSharding(mesh, PartitionSpec())
        # Some weights of a critic's head have the names of a decoder's.
        name = "" if "head" in names[:-1] else names[-1]
        first = 1 if "layers" in names and x.ndim > 2 else 0
        return NamedSharding(mesh, stored_spec(name, x.shape, config, mesh, first))

    return jax.tree_util.tree_map_with_path(place, tree)
