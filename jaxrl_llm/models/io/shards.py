"""An array that is put together on the host piece by piece, of which a process keeps the shards of its own devices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

Region = tuple[tuple[int, int], ...]  # first and last index + 1 along each axis


class Shards:
    """The host's copies of an array's shards; of all of it without a sharding."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.Sharding | None = None) -> None:
        self.shape, self.sharding = shape, sharding
        indices: list[Any] = [tuple(slice(None) for _ in shape)]
        if sharding is not None:
            indices = list(sharding.addressable_devices_indices_map(shape).values())
        regions = dict.fromkeys(_region(index, shape) for index in indices)
        self.parts: dict[Region, Any] = {
            region: np.empty([end - start for start, end in region], dtype) for region in regions
        }

    def fill(self, index: tuple[int, ...], piece: np.ndarray) -> Iterator[np.ndarray]:
        """Set array[index] = piece where it is kept. index: into the first axes. Yields what was written."""
        for region, part in self.parts.items():
            inside = [i - start for i, (start, end) in zip(index, region, strict=False) if start <= i < end]
            if len(inside) == len(index):
                own, rest = part[(*inside, ...)], tuple(slice(start, end) for start, end in region[len(index) :])
                with np.errstate(over="ignore", invalid="ignore"):
                    own[...] = piece[rest]
                yield own

    def array(self) -> jax.Array:
        """The array on its devices."""
        if self.sharding is None:
            # `jnp.asarray` compiles a program for each shape; what is donated later must be a copy.
            return jax.device_put(next(iter(self.parts.values())), may_alias=False)
        return jax.make_array_from_callback(
            self.shape, self.sharding, lambda index: self.parts[_region(index or (), self.shape)]
        )


def _region(index: tuple[slice, ...], shape: tuple[int, ...]) -> Region:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
