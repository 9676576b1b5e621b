"""Meshes, and the arrays on them: replicated, with rows sharded, or in the host's memory."""

from __future__ import annotations

import logging
import math
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.distributed.ahead_of_time import place
from jaxrl_llm.errors import InputError

logger = logging.getLogger("jaxrl_llm.distributed")

HOST = "pinned_host"


def data_mesh(devices: list[Any] | None = None) -> Mesh:
    """All devices (or those given) along one axis, "data"."""
    devices = jax.devices() if devices is None else devices
    return jax.make_mesh((len(devices),), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=devices)


def make_mesh(data: int = -1, tensor: int = 1, devices: list[Any] | None = None) -> Mesh:
    """All devices (or those given) along two axes: "data" shards rows, "tensor" shards weights (`sharding`).

    data, tensor: devices along each axis, at least 1; -1, for one of them, takes what the other leaves. "tensor",
    which communicates in every layer, is the inner axis: its devices are neighbours in the order of jax.make_mesh.
    Raises InputError where the two do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = {"data": data, "tensor": tensor}
    for name, size in sizes.items():
        if size != -1 and size < 1:
            raise InputError(f"the mesh axis {name} is {size}: give a number of devices, or -1 for what is left")
    given = [size for size in sizes.values() if size != -1]
    if not given:
        raise InputError("both mesh axes are -1: give a number of devices for data or for tensor")
    product = math.prod(given)
    if len(devices) % product or (len(given) == 2 and product != len(devices)):
        raise InputError(
            f"a mesh of data={data} x tensor={tensor} does not fit {len(devices)} devices: "
            "choose sizes whose product is their number, or -1 for one of them"
        )
    shape = tuple(len(devices) // product if size == -1 else size for size in sizes.values())
    return jax.make_mesh(shape, tuple(sizes), axis_types=(jax.sharding.AxisType.Auto,) * 2, devices=devices)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Replicate every array on all devices."""
    return place(tree, NamedSharding(mesh, PartitionSpec()))


def to_mesh(batch: Any, mesh: Mesh) -> Any:
    """Put a batch of host arrays on the devices: rows sharded over the axis "data", scalars replicated.

    batch: a pytree of arrays whose leading axis (rows) the size of the axis "data" must divide, and of scalars.
    """
    rows, whole = NamedSharding(mesh, PartitionSpec("data")), NamedSharding(mesh, PartitionSpec())
    return place(batch, jax.tree.map(lambda x: rows if np.ndim(x) else whole, batch))


def check_rows(rows: int, minibatches: int, micro_batches: int, devices: int) -> None:
    """InputError unless `rows` completions split evenly into minibatches, micro-batches and devices."""
    parts = minibatches * micro_batches * devices
    if rows % parts:
        raise InputError(
            f"a step has {rows} completions (prompts_per_step x group_size), which {minibatches} minibatches x "
            f"{micro_batches} micro_batches x {devices} devices = {parts} does not divide: change one of them"
        )


def to_host(tree: Any) -> Any:
    """Arrays in the host's pinned memory, with the same sharding: they take no device memory.

    Inside a jitted function `to_device` brings them back. Where the platform has no such memory, or has only the
    host's (CPUs), the arrays stay where they are, and one line is logged.
    """
    devices = {device for x in jax.tree.leaves(tree) for device in x.devices()}
    if any(device.platform == "cpu" for device in devices):
        logger.warning("weights stay where they are: on CPUs all memory is the host's")
        return tree
    if not all(HOST in {memory.kind for memory in device.addressable_memories()} for device in devices):
        logger.warning("weights stay on the devices: this platform has no memory of the kind %s", HOST)
        return tree
    return to_memory(tree, HOST)


def to_memory(tree: Any, kind: str) -> Any:
    """Arrays in another kind of memory ("device", "pinned_host" ...) of the same devices, not waited for."""
    return jax.device_put(tree, jax.tree.map(lambda x: x.sharding.with_memory_kind(kind), tree))


def to_device(tree: Any) -> Any:
    """For use inside jit: what is in the host's memory, on the device; the rest as it is."""
    host, device = jax.memory.Space.Host, jax.memory.Space.Device
    return jax.tree.map(lambda x: jax.device_put(x, device) if jax.typeof(x).memory_space == host else x, tree)
