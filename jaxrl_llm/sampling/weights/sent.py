"""Weights for samplers in other programs: sent layer by layer, in the layout of their decode loop, each byte once."""

import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxrl_llm.models.parameters import without_critic
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.quantised import kind_of
from jaxrl_llm.sampling.weights.adapters import adapters_alone, replace_adapters
from jaxrl_llm.sampling.weights.layouts import LoopOptions, loop_places, options_for, outside_layers, whole_converter
from jaxrl_llm.sampling.weights.take import Weights
from jaxrl_llm.utils.errors import InputError


class Offer(NamedTuple):
    """Arrays that another program may pull, once."""

    number: int
    shapes: Any  # a pytree of ShapeDtypeStructs

    @property
    def bytes(self) -> int:
        """Of all arrays."""
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(self.shapes))


class Outlet:
    """The sender's end. host: the address of this machine for the other one."""

    def __init__(self, host: str) -> None:
        self._server = _server(host)
        self._numbers = itertools.count()
        self.address = str(self._server.address())

    def offer(self, arrays: Any) -> Offer:
        """Offer a pytree of arrays, each of which is on one device of this process."""
        number = next(self._numbers)
        self._server.await_pull(number, jax.tree.leaves(arrays))
        return Offer(number, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), arrays))


class Inlet:
    """The receiver's end. address: of the sender's `Outlet`; host: of this machine for the other one."""

    def __init__(self, address: str, host: str, device: jax.Device) -> None:
        self._server = _server(host)
        self._connection = self._server.connect(address)
        self._place = SingleDeviceSharding(device)

    def pull(self, offer: Offer) -> Any:
        """The arrays of an offer, on the device."""
        shapes, tree = jax.tree.flatten(offer.shapes)
        wanted = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._place) for x in shapes]
        return jax.block_until_ready(jax.tree.unflatten(tree, self._connection.pull(offer.number, wanted)))


def _server(host: str) -> Any:
    from jax.experimental import transfer

    at = f"[{host}]:0" if ":" in host else f"{host}:0"
    return transfer.start_transfer_server(jax.local_devices()[0].client, at, [at])


ADAPTERS = "adapters"
Part = int | str | None  # number of a layer; None: all but layers; ADAPTERS: adapters alone
Send = Callable[[Part, Any], object]  # (which part, its arrays, on one device of this host): sends it


class Receiver(NamedTuple):
    """What weights are received for. mesh: of the sampler's devices; None: one device."""

    policy: Policy
    options: LoopOptions
    places: Any  # of the loop's weights: shardings, or the device
    mesh: Mesh | None


def receiver(policy: Policy, params: Params, devices: Mesh, weight_dtype: str | Any | None) -> Receiver:
    """What the weights of a policy are received for, whose parameters have these shapes."""
    mesh, device = None if devices.size == 1 else devices, devices.devices.flat[0]
    options = options_for(device, mesh, kind_of(weight_dtype) or policy.rounding)
    return Receiver(policy, options, device if mesh is None else loop_places(policy, params, mesh, options), mesh)


def send_all(policy: Policy, params: Params, options: LoopOptions, part: Send) -> None:
    """Send a policy's parameters, all parts one after another: none is made before the one before it has arrived.

    Where they are sharded over several hosts, all of them must call this, each for its own samplers. InputError for two
    policies.
    """
    if "other" in params:
        raise InputError("samplers in other programs have the weights of one policy, but this method trains two")
    own, mesh = without_critic(params), _mesh_of(params)
    numbers = iter((None, *range(policy.config.num_layers)))

    def finish(out: Any) -> Params:
        part(next(numbers), _here(out))
        return {}

    whole_converter(policy, mesh, options)(policy, own, finish=finish)


def send_adapters(params: Params, part: Send) -> bool:
    """Send the adapters of parameters, where updates change nothing else, and say whether they do; see `send_all`."""
    if (adapters := adapters_alone(params)) is None:
        return False
    part(ADAPTERS, _here(_whole(_mesh_of(adapters))(adapters)))
    return True


def _mesh_of(params: Params) -> Mesh | None:
    """The mesh of parameters, None on one device."""
    sharding = jax.tree.leaves(params)[0].sharding
    spread = isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh) and sharding.mesh.size > 1
    return sharding.mesh if spread else None


def _here(tree: Any) -> Any:
    """Arrays that each device has whole, as those of one device of this host."""
    return jax.tree.map(lambda x: x.addressable_shards[0].data, tree)


def _whole(mesh: Mesh | None) -> Callable[[Any], Any]:
    if mesh is None:
        return lambda tree: tree
    return jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))


class Arriving:
    """Weights that arrive part by part."""

    def __init__(self, of: Receiver, pull: Callable[[Offer], Any]) -> None:
        self._of, self._pull = of, pull
        self._parts: dict[Part, Any] = {}
        self._bytes, self._seconds = 0, 0.0

    def add(self, part: Part, offer: Offer) -> None:
        """Pull a part, and put it where the sampler needs it."""
        start = time.perf_counter()
        arrays = self._pull(offer)
        if part != ADAPTERS:
            places = self._of.places
            if self._of.mesh is not None:
                places = outside_layers(places) if part is None else places["layers"][part]
            arrays = jax.block_until_ready(jax.device_put(arrays, places))
        self._parts[part] = arrays
        self._bytes, self._seconds = self._bytes + offer.bytes, self._seconds + time.perf_counter() - start

    def weights(self, before: Weights | None) -> Weights:
        """The weights, once all parts are there. before: those of which adapters alone change."""
        parts, self._parts = self._parts, {}
        policy = self._of.policy
        if ADAPTERS in parts:
            assert before is not None
            found = replace_adapters(policy, before, parts[ADAPTERS])
            assert found is not None
        else:
            loop = parts[None] | {"layers": tuple(parts[number] for number in range(policy.config.num_layers))}
            found = Weights(loop, loop, self._of.mesh, device=None if self._of.mesh is not None else self._of.places)
        found = found._replace(moved_bytes=self._bytes, moved_seconds=self._seconds)
        self._bytes, self._seconds = 0, 0.0
        return found
