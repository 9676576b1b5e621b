"""Arrays that are put together from pieces: a process keeps its own shards, each with the numbers of the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxrl_llm.models.io.huggingface import Shards

SHAPE = (3, 4, 6)  # layers first, which pieces index


class Cut:
    """A sharding of which this process has these parts."""

    def __init__(self, *parts: tuple[slice, ...]) -> None:
        self.parts = parts

    def addressable_devices_indices_map(self, shape: tuple[int, ...]) -> dict[int, Any]:
        assert shape == SHAPE
        return dict(enumerate(self.parts))


def filled(sharding: Any) -> tuple[Shards, np.ndarray]:
    whole = np.random.default_rng(0).normal(size=SHAPE)
    shards = Shards(SHAPE, np.float32, sharding)
    for layer in range(SHAPE[0]):
        for part in shards.fill((layer,), whole[layer]):
            assert np.isfinite(part).all()
    return shards, whole.astype(np.float32)


def test_without_a_sharding_it_is_the_whole() -> None:
    shards, whole = filled(None)
    np.testing.assert_array_equal(shards.array(), whole)


@pytest.mark.parametrize(
    "cut",
    [
        Cut((slice(None), slice(0, 2), slice(None)), (slice(None), slice(2, 4), slice(None))),  # two devices
        Cut((slice(None), slice(2, 4), slice(3, 6))),  # a part of a part, the others elsewhere
        Cut((slice(1, 2), slice(None), slice(None))),  # of one layer only
        Cut((slice(None),) * 3, (slice(None),) * 3),  # two copies, held once
    ],
)
def test_it_keeps_its_own_parts_and_nothing_else(cut: Cut) -> None:
    shards, whole = filled(cut)
    assert len(shards.parts) == len({str(part) for part in cut.parts})
    for part in cut.parts:
        region = tuple(one.indices(size)[:2] for one, size in zip(part, SHAPE, strict=True))
        np.testing.assert_array_equal(shards.parts[region], whole[part])
    assert sum(x.size for x in shards.parts.values()) == sum(
        whole[part].size for part in {str(p): p for p in cut.parts}.values()
    )


def test_pieces_of_two_indices() -> None:
    """Layers and experts: a piece is one expert's matrix of one layer."""
    whole = np.arange(72).reshape(SHAPE).astype(np.float32)
    shards = Shards(SHAPE, np.float32, Cut((slice(None), slice(1, 3), slice(None))))
    for index in np.ndindex(3, 4):
        written = list(shards.fill(index, whole[index]))
        assert len(written) == (index[1] in (1, 2))
    np.testing.assert_array_equal(shards.parts[((0, 3), (1, 3), (0, 6))], whole[:, 1:3])
