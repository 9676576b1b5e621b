"""Arrays from the devices of one program to those of another, by JAX's transfer server: the receiver pulls.

What is offered stays on the sender's devices until it has been pulled.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import jax
from jax.sharding import SingleDeviceSharding


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
