"""The devices of one host among those of several: its part of a mesh, and arrays on one and on the other."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.placement import DATA, TENSOR

HOST = "host"


def by_host(mesh: Mesh) -> Mesh:
    """The same devices, in the same order, along "host", "data" and "tensor".

    InputError where the devices of a host do not hold whole copies of what is split over "tensor".
    """
    tensor = mesh.shape.get(TENSOR, 1)
    devices = mesh.devices.reshape(-1, tensor)
    hosts = len({device.process_index for device in devices.flat})
    each = devices.reshape(hosts, -1) if devices.size % hosts == 0 else devices
    if len(each) != hosts or any(len({device.process_index for device in row}) > 1 for row in each):
        raise InputError(
            f"the mesh {dict(mesh.shape)} does not give each of {hosts} hosts whole rows of devices: the axis tensor "
            f"must divide the devices of a host, and every host needs as many"
        )
    types = (jax.sharding.AxisType.Auto,) * 3
    if each.shape[1] % tensor:
        raise InputError(
            f"tensor={tensor} does not divide the {each.shape[1]} devices of a host: each host samples on its own"
        )
    return Mesh(each.reshape(hosts, -1, tensor), (HOST, DATA, TENSOR), axis_types=types)


def of_this_host(mesh: Mesh) -> Mesh:
    """The devices of this process, along "data" and "tensor"; the mesh itself where there is no other process."""
    if all(device.process_index == jax.process_index() for device in mesh.devices.flat):
        return mesh
    whole = by_host(mesh)
    own = next(row for row in whole.devices if row.flat[0].process_index == jax.process_index())
    return Mesh(own, (DATA, TENSOR), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def own_copy(tree: Any, mesh: Mesh) -> Any:
    """Arrays on `by_host` of a mesh, replicated over "host", as arrays on this host's devices. Nothing is copied.

    mesh: `of_this_host`.
    """

    def own(x: jax.Array) -> jax.Array:
        parts = [shard.data for shard in x.addressable_shards]
        assert isinstance(x.sharding, NamedSharding)
        return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(mesh, x.sharding.spec), parts)

    return jax.tree.map(own, tree)


def to_numpy(tree: Any, mesh: Mesh) -> Any:
    """Arrays that are sharded over several hosts, whole, on each of them; other trees as they are."""
    if jax.process_count() == 1:
        return tree
    whole = jax.jit(_same, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree)
    return jax.tree.map(np.asarray, whole)


def _same(tree: Any) -> Any:
    return tree
