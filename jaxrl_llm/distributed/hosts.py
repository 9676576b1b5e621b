"""The processes ("hosts") of one run: what they tell each other.

All hosts run the same program. Global arrays are sharded over the devices of all; what is on the host (prompts,
batches, decisions) is either computed alike by each or exchanged with `Hosts.gather`. A process alone is the same
program with one host, and exchanges nothing.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
import numpy as np

from jaxrl_llm.core.shapes import bucket
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
    """Hosts of a unit, which sample as one (`on_hosts`): numbers 0 to together - 1, and so on."""
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
    count = jax.process_count()
    return ALONE if count == 1 else Hosts(jax.process_index(), count, _gather)


def _gather(value: Any) -> list[Any]:
    from jax.experimental.multihost_utils import process_allgather

    return gather_through(process_allgather, value)


def gather_through(exchange: Callable[[np.ndarray], Any], value: Any) -> list[Any]:
    """The values of several hosts, through the devices: the fastest way between hosts. Values up to 2 GiB.

    exchange: gives an array of each host, of one shape, to all of them, stacked.
    """
    data = np.frombuffer(pickle.dumps(value, protocol=5), np.uint8)
    sizes = np.asarray(exchange(np.asarray(data.size, np.int32)))
    room = bucket(int(sizes.max()), 64, 1)  # few sizes, of which each is compiled once
    padded = np.zeros(room, np.uint8)
    padded[: data.size] = data
    found = np.asarray(exchange(padded))
    return [pickle.loads(row[:size].tobytes()) for row, size in zip(found, sizes, strict=True)]
