"""The axes of a mesh, and those over which rows and tokens are split."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
from jax.sharding import AbstractMesh, Mesh
from jaxrl_kernels.implementations import takes_triton

DATA, FSDP, EXPERT, SEQUENCE, TENSOR = "data", "fsdp", "expert", "sequence", "tensor"
MESH_AXES = (DATA, FSDP, EXPERT, SEQUENCE, TENSOR)  # outer to inner: the last communicate most
ROWS = (DATA, FSDP, EXPERT)
SAMPLED_ROWS = (*ROWS, SEQUENCE)
AnyMesh = Mesh | AbstractMesh


def axes_of(mesh: AnyMesh, names: Sequence[str]) -> str | tuple[str, ...] | None:
    """Those of some axes that the mesh has, for a PartitionSpec."""
    found = tuple(name for name in names if name in mesh.shape)
    return found[0] if len(found) == 1 else found or None


def row_axes(mesh: AnyMesh, names: Sequence[str] = ROWS) -> str | tuple[str, ...] | None:
    """The axes of the mesh over which rows are sharded, for a PartitionSpec. names: ROWS, or SAMPLED_ROWS."""
    return axes_of(mesh, names)


def row_shards(mesh: AnyMesh | None, names: Sequence[str] = ROWS) -> int:
    """How many shards rows are split into; 1 without a mesh. names: ROWS, or SAMPLED_ROWS."""
    return 1 if mesh is None else math.prod(mesh.shape.get(name, 1) for name in names)


def token_shards(mesh: AnyMesh | None) -> int:
    """How many shards the tokens of packed rows are split into in learning; 1 without a mesh."""
    return row_shards(mesh, (SEQUENCE,))


def takes_kernels(mesh: AnyMesh | None) -> bool:
    """Whether the devices of a mesh, or JAX's own where there is none, take kernels for attention."""
    device = one_device(mesh)
    return device is not None and (device.platform == "tpu" or takes_triton(device))


def one_device(mesh: AnyMesh | None) -> jax.Device | None:
    """One of the devices of a mesh, or of JAX's own where there is none."""
    if isinstance(mesh, AbstractMesh):
        return None
    return mesh.devices.flat[0] if isinstance(mesh, Mesh) else jax.local_devices()[0]
