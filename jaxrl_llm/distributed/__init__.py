"""Meshes and sharding rules."""

from jaxrl_llm.distributed.mesh import check_rows, data_mesh, replicate, shard_rows

__all__ = ["check_rows", "data_mesh", "replicate", "shard_rows"]
