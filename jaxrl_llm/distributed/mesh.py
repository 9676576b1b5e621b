"""Meshes, and the arrays on them: replicated, with rows sharded, or in the host's memory."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh, create_hybrid_device_mesh
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.core.arguments.checks import checked
from jaxrl_llm.core.arguments.ranges import Count
from jaxrl_llm.distributed.aot import place
from jaxrl_llm.models.mesh_axes import DATA, EXPERT, FSDP, MESH_AXES, ROWS, SEQUENCE, TENSOR, axes_of
from jaxrl_llm.utils.errors import InputError, shown

logger = logging.getLogger("jaxrl_llm.distributed")
HOST = "pinned_host"
SAMPLING_AXES = (DATA, EXPERT, TENSOR)


@checked
def data_mesh(devices: Sequence[Any] | None = None) -> Mesh:
    """All devices (or those given) along one axis, "data"."""
    devices = jax.devices() if devices is None else devices
    return _arranged({DATA: len(devices)}, devices)


@checked
def make_mesh(
    data: int = -1,
    tensor: int = 1,
    devices: Sequence[Any] | None = None,
    fsdp: int = 1,
    expert: int = 1,
    sequence: int = 1,
) -> Mesh:
    """All devices (or those given) along the axes "data", "fsdp", "expert", "sequence" and "tensor".

    Rows are sharded over the first three; over "fsdp", weights and their moments are too (`fully_sharded`), over
    "expert" the experts of a mixture, over "sequence" the tokens of long rows, and over "tensor" heads, inner units and
    the vocabulary (`sharding`, `models.mesh_axes`). Each: devices along the axis, at least 1; -1, for one of them,
    takes what the others leave. The inner axes, which communicate in every layer, come last: their devices are
    neighbours in the order of jax.make_mesh. A mesh with one device along "fsdp", "expert" or "sequence" does not have
    that axis. Raises InputError where they do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = {DATA: data, FSDP: fsdp, EXPERT: expert, SEQUENCE: sequence, TENSOR: tensor}
    return _arranged(_filled(sizes, len(devices)), devices)


def _filled(sizes: dict[str, int], devices: int) -> dict[str, int]:
    """The sizes of the axes that a mesh of so many devices has, without -1. InputError where they do not fit."""
    for name, size in sizes.items():
        if size != -1 and size < 1:
            raise InputError(f"the mesh axis {name} is {size}: give a number of devices, or -1 for what is left")
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise InputError(f"the mesh axes {' and '.join(open_axes)} are -1: only one can take what the others leave")
    product = math.prod(size for size in sizes.values() if size != -1)
    if not devices or devices % product or (not open_axes and product != devices):
        given = " x ".join(f"{name}={size}" for name, size in sizes.items() if name in (DATA, TENSOR) or size != 1)
        raise InputError(
            f"a mesh of {given} does not fit {devices} devices: "
            "choose sizes whose product is their number, or -1 for one of them"
        )
    sizes = {name: devices // product if size == -1 else size for name, size in sizes.items()}
    return {name: size for name, size in sizes.items() if name in (DATA, TENSOR) or size > 1}


def _arranged(sizes: dict[str, int], devices: Sequence[Any]) -> Mesh:
    """The devices along these axes; of several slices, whose network is slower than their links, along the first.

    Those of a host stand together, so that each host can sample on its own (`hosts.by_unit`). A part of a TPU slice,
    of which JAX arranges none, stays in its order. InputError where neither "data" nor "fsdp" is a multiple of the
    number of slices.
    """
    if not devices:
        raise InputError("a mesh needs at least one device")
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    shape = tuple(sizes.values())
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices > 1:
        between = next((name for name in (DATA, FSDP) if sizes.get(name, 1) % slices == 0), None)
        if between is None:
            raise InputError(
                f"the mesh {sizes} is to spread over {slices} slices: make data or fsdp a multiple of {slices}"
            )
        outer = [slices if name == between else 1 for name in sizes]
        inner = [size // count for size, count in zip(shape, outer, strict=True)]
        arranged = create_hybrid_device_mesh(inner, outer, devices)
    elif _is_box(devices):
        try:
            arranged = jax.make_mesh(shape, tuple(sizes), axis_types=types, devices=devices).devices
        except NotImplementedError:  # an axis is a part of one of the slice's
            arranged = create_device_mesh(shape, devices, allow_split_physical_axes=True)
    else:
        arranged = np.fromiter(devices, object, len(devices)).reshape(shape)
    # Those of each process next to each other, else in their order.
    ordered = sorted(arranged.flat, key=lambda device: device.process_index)
    arranged = np.fromiter(ordered, object, len(ordered)).reshape(arranged.shape)
    return Mesh(arranged, tuple(sizes), axis_types=types)


def _is_box(devices: Sequence[Any]) -> bool:
    """Whether the devices, if they are TPUs, are all from the first corner of their slice to the one opposite."""
    places = [getattr(device, "coords", None) for device in devices]
    if any(place is None for place in places):
        return True
    cores = len({getattr(device, "core_on_chip", 0) for device in devices})
    return math.prod(max(along) + 1 for along in zip(*places, strict=True)) * cores == len(devices)


@checked
def mesh_of(text: str, devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh that a text names, such as "data=2,fsdp=4,tensor=2"; without one, all devices along "data".

    Where "data" is not named it takes what the other axes leave. Raises InputError for a malformed text, another axis,
    and as `make_mesh`.
    """
    if not text:
        return data_mesh(devices)
    devices = jax.devices() if devices is None else list(devices)
    return _arranged(mesh_sizes(text, len(devices)), devices)


@checked
def mesh_sizes(text: str, devices: Count) -> dict[str, int]:
    """The axes of the mesh that a text names on so many devices. InputError as for `mesh_of`."""
    sizes = _named_sizes("mesh", text, MESH_AXES, "data=2,fsdp=4,tensor=2")
    return _filled({**dict.fromkeys(MESH_AXES, 1), **sizes}, devices)


def _named_sizes(setting: str, text: str, axes: Sequence[str], example: str) -> dict[str, int]:
    """The sizes that a text names; "data", if it is not named, takes what the others leave."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, _, size = (word.strip() for word in part.partition("="))
        if name not in axes or name in sizes or not size.removeprefix("-").isdecimal():
            raise InputError(
                f"{setting} is {shown(text)}: give numbers of devices along {', '.join(axes[:-1])} and {axes[-1]}, "
                f"each once, such as {example}"
            )
        sizes[name] = int(size)
    return {DATA: 1 if -1 in sizes.values() else -1, **sizes}


@checked
def sampling_sizes(text: str, devices: Count) -> dict[str, int]:
    """The axes of the mesh that a text names for sampling on so many devices. InputError as for `sampling_mesh_of`."""
    sizes = _named_sizes("sampling_mesh", text, SAMPLING_AXES, "data=4,tensor=4")
    try:
        return _filled({DATA: 1, EXPERT: 1, TENSOR: 1, **sizes}, devices)
    except InputError as error:
        raise InputError(f"sampling_mesh: {error}") from None


@checked
def sampling_mesh_of(text: str, mesh: Mesh) -> Mesh:
    """The mesh that a run samples on: the devices of its own mesh along "data", "expert" and "tensor".

    text: as for `mesh_of`, such as "data=4,tensor=4"; "" is the run's mesh itself. The devices stay in their order, for
    a program that reads the training's arrays and gives the sampler's takes but one. Raises InputError for a malformed
    text, another axis, and sizes that do not multiply to the number of devices.
    """
    if not text:
        return mesh
    sizes = sampling_sizes(text, mesh.size)
    types = (jax.sharding.AxisType.Auto,) * len(sizes)
    return Mesh(mesh.devices.reshape(tuple(sizes.values())), tuple(sizes), axis_types=types)


def replicate(tree: Any, mesh: Mesh) -> Any:
    """Replicate every array on all devices."""
    return place(tree, NamedSharding(mesh, PartitionSpec()))


def to_mesh(batch: Any, mesh: Mesh) -> Any:
    """Put a batch of host arrays on the devices: rows sharded over ROWS of `models.mesh_axes`, scalars replicated.

    batch: a pytree of arrays whose leading axis (rows) the sizes of these axes must divide, and of scalars.
    """
    rows, whole = on_rows(mesh), NamedSharding(mesh, PartitionSpec())
    return place(batch, jax.tree.map(lambda x: rows if np.ndim(x) else whole, batch))


def on_rows(mesh: Mesh) -> NamedSharding:
    """The sharding of the rows of a batch."""
    return NamedSharding(mesh, PartitionSpec(axes_of(mesh, ROWS)))


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


def on_device(tree: Any) -> Any:
    """What is in the host's memory (`to_host`), on the device, with the same sharding; the rest as it is."""
    return jax.tree.map(lambda x: to_memory(x, "device") if x.sharding.memory_kind == HOST else x, tree)
