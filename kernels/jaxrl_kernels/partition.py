"""Kernels on a mesh: each runs in a `jax.shard_map`, on every device's shard of the arrays.

XLA cannot partition a Pallas kernel, so without this a kernel fails to compile if its arrays are sharded.
`jax.experimental.custom_partitioning` would see how XLA partitions the arrays, but (JAX 0.10) it has no batching rule,
libtpu does not know its callbacks when a program is compiled ahead of time, and their addresses are part of the key of
the compilation cache. `shard_map` has none of these problems, but needs to know which axes of the mesh to use. Every
kernel therefore takes names of mesh axes, and shards its arrays over those that the mesh has and whose size divides the
arrays evenly. XLA reshards arrays with another sharding; the results are the same.

The mesh need not be passed: the type of an array on a mesh contains it, also under `jax.jit` (see `mesh_of`).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

AnyMesh = Mesh | AbstractMesh
Axis = str | tuple[str, ...]  # one or several names of mesh axes
ROWS: Axis = ("data", "fsdp", "expert", "sequence")  # over which rows are sharded by default, where the mesh has them


def mesh_of(mesh: AnyMesh | None, *arrays: Any) -> AnyMesh | None:
    """The mesh to shard arrays (pytrees) over, or None on a single device and inside a `shard_map`.

    This is `mesh`, else the mesh of the first array that has one, else that of `jax.set_mesh`. The types of arrays have
    no mesh if `jax.jit` gets in_shardings for arguments without a sharding: pass `mesh` then.
    """
    if mesh is None:
        of_arrays = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays))
        mesh = next((found for found in of_arrays if not found.empty), jax.sharding.get_abstract_mesh())
    inside = isinstance(mesh, AbstractMesh) and mesh.manual_axes
    return None if inside or mesh.size <= 1 else mesh


def dividing(mesh: AnyMesh, axis: Axis, *sizes: int) -> Axis | None:
    """The axes of the mesh, among `axis`, with more than one device, if together they divide all sizes; else None.

    For use in a `jax.P`, where None means replicated.
    """
    names = tuple(name for name in ((axis,) if isinstance(axis, str) else axis) if mesh.shape.get(name, 1) > 1)
    devices = math.prod(mesh.shape[name] for name in names)
    if not names or any(size % devices for size in sizes):
        return None
    return names[0] if len(names) == 1 else names


def first_dividing(mesh: AnyMesh, axes: Axis, size: int) -> Axis | None:
    """The first of `axes`, as many as divide a size together (see `dividing`); None where not even the first does."""
    names = (axes,) if isinstance(axes, str) else axes
    found = (dividing(mesh, names[:end], size) for end in range(len(names), 0, -1))
    return next((some for some in found if some is not None), None)


def check_apart(row_axis: Axis, other_axis: Axis) -> None:
    """Raise a ValueError if two dimensions would be sharded over the same mesh axis."""
    rows, others = ({x} if isinstance(x, str) else set(x) for x in (row_axis, other_axis))
    if rows & others:
        raise ValueError(f"mesh axis {min(rows & others)!r} cannot shard both rows and another dimension: use two axes")


def varying(array: Any) -> frozenset[str]:
    """Mesh axes that an array varies over inside `jax.shard_map`; empty outside."""
    return jax.typeof(array).manual_axis_type.varying


def zeros(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.Array:
    """Zeros with the varying axes of `like` inside `jax.shard_map`, so that a scan can carry them."""
    axes = tuple(sorted(varying(like)))
    return jax.lax.pcast(jnp.zeros(shape, dtype), axes, to="varying") if axes else jnp.zeros(shape, dtype)


def vary_together(*arrays: Any) -> tuple[Any, ...]:
    """Inside `jax.shard_map`, make all inputs (pytrees) vary over the axes that any of them varies over.

    A custom VJP must return a cotangent with the varying axes of its input. The transpose of this cast then sums the
    gradient of an unembedding over data-parallel devices, and that of hidden states over slices of the vocabulary.
    Outside of `shard_map` it does nothing.
    """
    together = frozenset().union(*(varying(array) for array in jax.tree.leaves(arrays)))

    def cast(array: jax.Array) -> jax.Array:
        missing = tuple(sorted(together - varying(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(cast, arrays)
