"""Meshes and sharding rules."""

from jaxrl_llm.distributed.aot import Program, ahead_of_time
from jaxrl_llm.distributed.mesh import check_rows, data_mesh, make_mesh, mesh_of, replicate, sampling_mesh_of, to_mesh
from jaxrl_llm.distributed.sharding import (
    Moved,
    bytes_per_device,
    bytes_to_move,
    check_mesh,
    describe_sharding,
    fully_sharded,
    named_shardings,
    parameter_specs,
    reshard,
    shard_params,
    shardings_over,
)

__all__ = [
    "Moved", "Program", "ahead_of_time", "bytes_per_device", "bytes_to_move", "check_mesh", "check_rows", "data_mesh",
    "describe_sharding", "fully_sharded", "make_mesh", "mesh_of", "named_shardings", "parameter_specs", "replicate",
    "reshard", "sampling_mesh_of", "shard_params", "shardings_over", "to_mesh",
]  # fmt: skip
