"""Kernels on a mesh: `jax.shard_map` around each, so that every device runs it on its block of the arrays.

XLA does not partition a Pallas kernel, so a bare one fails to compile where its arrays lie on several devices.
`jax.experimental.custom_partitioning` would see how XLA partitions the arrays, but (JAX 0.10) it has no batching rule,
its callbacks are unknown to libtpu when a program is compiled ahead of time, and their addresses are part of the key of
the compilation cache. A `shard_map` has none of these problems, but must be told which axes of the mesh to use: every
kernel therefore takes names of mesh axes, and cuts its arrays over those that the mesh has and whose size divides the
arrays evenly. Arrays that lie in another way are moved by XLA; the results are the same.

The mesh need not be passed: the type of an array that lies on a mesh names it, under `jax.jit` too (`mesh_of`).
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

AnyMesh = Mesh | AbstractMesh
Axis = str | tuple[str, ...]  # of a mesh: a name, or several


def mesh_of(mesh: AnyMesh | None, *arrays: Any) -> AnyMesh | None:
    """The mesh to cut arrays (pytrees) over, or None to leave them as they are: on one device, or in a `shard_map`.

    It is `mesh`, else that of the first array on one, else that of `jax.set_mesh`. The types of arrays do not name one
    if `jax.jit` is given in_shardings for arguments without any: pass `mesh` there.
    """
    if mesh is None:
        of_arrays = (jax.typeof(x).sharding.mesh for x in jax.tree.leaves(arrays))
        mesh = next((found for found in of_arrays if not found.empty), jax.sharding.get_abstract_mesh())
    inside = isinstance(mesh, AbstractMesh) and mesh.manual_axes
    return None if inside or mesh.size <= 1 else mesh


def dividing(mesh: AnyMesh, axis: Axis, *sizes: int) -> Axis | None:
    """Those of the axes that the mesh has with more than one device, if together they divide all sizes; else None.

    For a `jax.P`, in which None means that every device holds all.
    """
    names = tuple(name for name in ((axis,) if isinstance(axis, str) else axis) if mesh.shape.get(name, 1) > 1)
    devices = math.prod(mesh.shape[name] for name in names)
    if not names or any(size % devices for size in sizes):
        return None
    return names[0] if len(names) == 1 else names


def check_apart(row_axis: Axis, other_axis: Axis) -> None:
    """Raise a ValueError if two dimensions would be cut over one mesh axis."""
    rows, others = ({x} if isinstance(x, str) else set(x) for x in (row_axis, other_axis))
    if rows & others:
        raise ValueError(f"mesh axis {min(rows & others)!r} cannot cut rows and another dimension too: name two axes")


def varying(array: Any) -> frozenset[str]:
    """Mesh axes that an array varies over inside `jax.shard_map`; none outside."""
    return jax.typeof(array).manual_axis_type.varying


def zeros(shape: tuple[int, ...], dtype: Any, like: jax.Array) -> jax.Array:
    """Zeros that vary as `like` does inside `jax.shard_map`, so that a scan may carry them."""
    axes = tuple(sorted(varying(like)))
    return jax.lax.pcast(jnp.zeros(shape, dtype), axes, to="varying") if axes else jnp.zeros(shape, dtype)


def vary_together(*arrays: Any) -> tuple[Any, ...]:
    """Inside `jax.shard_map`, make all inputs (pytrees) vary over the axes that any of them varies over.

    A custom VJP must return a cotangent that varies as its input does. The transpose of this cast then sums the
    gradient of an unembedding over data-parallel devices, and that of hidden states over slices of the vocabulary.
    Outside of `shard_map` it does nothing.
    """
    together = frozenset().union(*(varying(array) for array in jax.tree.leaves(arrays)))

    def cast(array: jax.Array) -> jax.Array:
        missing = tuple(sorted(together - varying(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return jax.tree.map(cast, arrays)
