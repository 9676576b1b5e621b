"""The processes ("hosts") of one run: what they tell each other.

All hosts run the same program. Global arrays are sharded over the devices of all; what is on the host (prompts,
batches, decisions) is either computed alike by each or exchanged with `Hosts.gather`. A process alone is the same
program with one host, and exchanges nothing.

The hosts of a mesh sample in units. A unit is as few hosts as hold whole rows of the axes "expert" and "tensor": mostly
one host, and several where a model needs more devices than a host has.
"""

import dataclasses
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.core.shapes import bucket
from jaxrl_llm.models.mesh_axes import DATA, EXPERT, TENSOR
from jaxrl_llm.utils.errors import InputError

T = TypeVar("T")


@dataclass(frozen=True)
class Hosts:
    """This host among all. The methods that exchange must be called by all hosts, in the same order."""

    index: int = 0
    count: int = 1
    gather: Callable[[Any], list[Any]] = lambda value: [value]
    """A picklable value -> the values of all hosts, in their order, on each."""
    together: int = 1
    """Hosts of a unit, which sample as one (`in_units`): numbers 0 to together - 1, and so on."""
    gather_in_unit: Callable[[Any], list[Any]] = lambda value: [value]
    """The same among the hosts of this one's unit, all of which must call it."""

    @property
    def first(self) -> bool:
        """Whether this is the host that writes the run's files."""
        return self.index == 0

    @property
    def leads(self) -> bool:
        """Whether this is the host that decides for its unit."""
        return self.index % self.together == 0

    @property
    def units(self) -> int:
        """How many units the hosts are."""
        return self.count // self.together

    def share(self, items: Sequence[T]) -> list[T]:
        """Every n-th item, for n units: the shares of all units make up the whole, and differ by one item at most."""
        return list(items[self.index // self.together :: self.units])

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on some host."""
        return any(self.gather(flag))

    def agree(self, what: Mapping[str, str]) -> None:
        """InputError, on all hosts, that names the first entry whose value is not the same on every host."""
        for index, other in enumerate(found := self.gather(dict(what))):
            for name in sorted(found[0].keys() | other.keys()):
                if found[0].get(name) != other.get(name):
                    raise InputError(
                        f"hosts 0 and {index} differ in {name}: all hosts need the same settings, files, code and "
                        "packages"
                    )


ALONE = Hosts()


def all_hosts() -> Hosts:
    """The processes of this JAX program; see `jax.distributed`."""
    from jax.experimental.multihost_utils import process_allgather

    count = jax.process_count()
    gather = partial(gather_through, process_allgather)
    return ALONE if count == 1 else Hosts(jax.process_index(), count, gather)


def gather_through(exchange: Callable[[np.ndarray], Any], value: Any) -> list[Any]:
    """The values of several hosts, through the devices: the fastest way between hosts. Values up to 2 GiB.

    exchange: gives an array of each host, of one shape, to all of them, stacked.
    """
    data = np.frombuffer(pickle.dumps(value, protocol=5), np.uint8)
    sizes = np.asarray(exchange(np.asarray(data.size, np.int32)))
    room = bucket(int(sizes.max()), 64, 1)  # few sizes, of which each is compiled once
    padded = np.zeros(room, np.uint8)
    padded[: data.size] = data
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(np.asarray(exchange(padded)), sizes, strict=True)]


HOST, UNIT = "host", "unit"


def by_unit(mesh: Mesh) -> Mesh:
    """The same devices along "unit", "data", "expert" (where the mesh has it) and "tensor".

    InputError where hosts have different numbers of devices.
    """
    names = (EXPERT, TENSOR) if EXPERT in mesh.shape else (TENSOR,)
    sizes = tuple(mesh.shape.get(name, 1) for name in names)
    last = [mesh.axis_names.index(name) for name in names if name in mesh.shape]
    first = [axis for axis in range(mesh.devices.ndim) if axis not in last]
    rows = mesh.devices.transpose(*first, *last).reshape(-1, *sizes)
    counts = Counter(device.process_index for device in rows.flat)
    if len(set(counts.values())) > 1:
        each = ", ".join(f"host {index} has {count}" for index, count in sorted(counts.items()))
        raise InputError(f"every host needs as many devices, but {each}")
    number = {index: place for place, index in enumerate(sorted(counts))}

    def unit(row: np.ndarray, together: int) -> set[int]:
        return {number[device.process_index] // together for device in row.flat}

    sizes_of_units = (n for n in range(1, len(counts) + 1) if len(counts) % n == 0)
    together = next(n for n in sizes_of_units if all(len(unit(row, n)) == 1 for row in rows))
    order = np.argsort([min(unit(row, together)) for row in rows], kind="stable")
    units = rows[order].reshape(len(counts) // together, -1, *sizes)
    return Mesh(units, (UNIT, DATA, *names), axis_types=(jax.sharding.AxisType.Auto,) * units.ndim)


def of_this_host(mesh: Mesh) -> Mesh:
    """The devices that this process samples on: those of its unit, along "data", "expert" and "tensor".

    The mesh itself where there is no other process.
    """
    if not _shared(mesh):
        return mesh
    units = by_unit(mesh)
    own = next(one for one in units.devices if any(_is_own(device) for device in one.flat))
    return Mesh(own, units.axis_names[1:], axis_types=units.axis_types[1:])


def units_of(mesh: Mesh) -> int:
    """How many units sample side by side, each with a share of the prompts."""
    return int(by_unit(mesh).shape[UNIT])


def in_units(hosts: Hosts, mesh: Mesh) -> Hosts:
    """The hosts with the units in which they sample on a mesh of all their devices."""
    together = hosts.count // units_of(mesh) if hosts.count > 1 else 1
    if together == 1:
        return hosts
    first_of = {device.process_index: device for device in reversed(list(of_this_host(mesh).devices.flat))}
    exchange = partial(_of_each, tuple(device for _, device in sorted(first_of.items())))
    return dataclasses.replace(hosts, together=together, gather_in_unit=partial(gather_through, exchange))


def _of_each(devices: tuple[Any, ...], x: np.ndarray) -> np.ndarray:
    """x of the host of each of these devices, stacked, on all these hosts."""
    mesh = Mesh(np.array(devices), (HOST,))
    own = jax.device_put(x[None], next(device for device in devices if _is_own(device)))
    shape = (len(devices), *x.shape)
    parts = jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, PartitionSpec(HOST)), [own])
    return np.asarray(_replicated(mesh)(parts))


def own_copy(tree: Any, mesh: Mesh) -> Any:
    """Arrays on `by_unit` of a mesh, replicated over "unit", as arrays on this unit's devices. Nothing is copied.

    mesh: `of_this_host`.
    """

    def own(x: jax.Array) -> jax.Array:
        parts = [shard.data for shard in x.addressable_shards]
        assert isinstance(x.sharding, NamedSharding)
        return jax.make_array_from_single_device_arrays(x.shape, NamedSharding(mesh, x.sharding.spec), parts)

    return jax.tree.map(own, tree)


def to_numpy(tree: Any, mesh: Mesh) -> Any:
    """Arrays on the devices of several hosts, whole, on each of them; of one host, as they are."""
    return jax.tree.map(np.asarray, _replicated(mesh)(tree)) if _shared(mesh) else tree


def _shared(mesh: Mesh) -> bool:
    """Whether other processes have devices of the mesh."""
    return not all(_is_own(device) for device in mesh.devices.flat)


def _is_own(device: Any) -> bool:
    return bool(device.process_index == jax.process_index())


@cache
def _replicated(mesh: Mesh) -> Any:
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))
