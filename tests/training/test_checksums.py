"""Checksums of arrays: their numbers, and what they notice."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.training.folder.checksums import checksum_of_json, checksums, checksums_on_host

WORD = 2**32
BITS = {1: np.uint8, 2: np.uint16, 4: np.uint32}


def mixed(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D % WORD
    x = (x ^ x >> 15) * 0x846CA68B % WORD
    return x ^ x >> 16


def by_hand(x: np.ndarray) -> int:
    """The checksum, element by element, in Python's integers. x: of at most 4 bytes an element, not negative."""
    first = second = 0
    bits = x.view(BITS[x.dtype.itemsize])
    for place in np.ndindex(x.shape):
        one = sum(i * 0x9E3779B1 ** (axis + 1) for axis, i in enumerate(place)) % WORD
        other = sum(i * 0xCC9E2D51 ** (axis + 1) for axis, i in enumerate(place)) % WORD
        hashed = mixed(int(bits[place]) ^ mixed(one))
        first, second = first + hashed, second + hashed * (2 * other + 1)
    return first % WORD + WORD * (second % WORD)


RANDOM = np.random.default_rng(0)
ARRAYS: dict[str, np.ndarray] = {
    "float32": RANDOM.normal(size=(3, 5, 2)).astype(np.float32),
    "bfloat16": np.asarray(jnp.asarray(RANDOM.normal(size=(7,)), jnp.bfloat16)),
    "int32": RANDOM.integers(-9, 9, (4, 3)).astype(np.int32),
    "uint32": RANDOM.integers(0, WORD, (6,)).astype(np.uint32),
    "int8": RANDOM.integers(0, 128, (5, 5)).astype(np.int8),
    "bool": RANDOM.random((9,)) < 0.5,
    "scalar": np.asarray(0.5, np.float32),
    "one of one": np.asarray([[1.5]], np.float32),
}


def test_the_numbers_are_those_of_the_definition() -> None:
    assert checksums(ARRAYS) == {f"['{name}']": by_hand(x) for name, x in ARRAYS.items()}


def test_arrays_of_numpy_and_of_jax_are_alike_and_keep_their_paths() -> None:
    tree = {"a": jnp.ones((2, 3)), "b": ({"c": jnp.zeros(4, jnp.int32)}, ())}
    found = checksums(tree)
    assert found == checksums(jax.tree.map(np.asarray, tree))
    assert list(found) == ["['a']", "['b'][0]['c']"]
    assert checksums({}) == {}


NAN = np.asarray([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.float32([0.0]), np.float32([-0.0])),
        (NAN[:1], NAN[1:]),
        (np.float32([1e-45, 1.0]), np.float32([0.0, 1.0])),
        (np.float32([1.0, 2.0]), np.float32([2.0, 1.0])),
        (np.float32([[1.0, 2.0], [3.0, 4.0]]), np.float32([[1.0, 3.0], [2.0, 4.0]])),
        (np.arange(64, dtype=np.int32), np.roll(np.arange(64, dtype=np.int32), 1)),
        (np.arange(64, dtype=np.int32), np.arange(64, dtype=np.int32)[::-1].copy()),
        (np.int8([-1]), np.int8([1])),
        (np.float32([1.0, 0.0]), np.float32([1.0])),
    ],
    ids=["sign of zero", "payload of NaN", "denormal", "swap", "transposed", "rolled", "reversed", "sign", "shorter"],
)
def test_what_differs_is_told_apart(one: np.ndarray, other: np.ndarray) -> None:
    assert checksums([one]) != checksums([other])
    assert checksums([one]) == checksums([one.copy()])


@settings(max_examples=60, deadline=None)
@given(place=st.integers(0, 12 * 8 - 1), bit=st.integers(0, 31), values=st.integers(0, 2**32 - 1))
def test_a_flipped_bit_changes_both_halves(place: int, bit: int, values: int) -> None:
    x = np.random.default_rng(values).integers(0, WORD, (12, 8)).astype(np.uint32)
    other = x.copy()
    other.flat[place] ^= np.uint32(1 << bit)
    (one,), (two,) = checksums([x]).values(), checksums([other]).values()
    assert one % WORD != two % WORD
    assert one // WORD != two // WORD


@settings(max_examples=40, deadline=None)
@given(places=st.lists(st.integers(0, 12 * 8 - 1), min_size=2, max_size=2, unique=True))
def test_swapped_elements_are_noticed(places: list[int]) -> None:
    x = np.arange(12 * 8, dtype=np.uint32).reshape(12, 8)
    other = x.copy()
    other.flat[places] = other.flat[places[::-1]]
    assert checksums([x]) != checksums([other])


def test_arrays_on_the_host_and_json() -> None:
    arrays: dict[str, Any] = {"tokens": np.arange(5), "none": np.zeros((0, 3))}
    assert checksums_on_host(arrays) == {"['arrays']['tokens']": 1821330972, "['arrays']['none']": 0}
    assert checksum_of_json({"a": 1, "b": [2]}) == checksum_of_json({"b": [2], "a": 1})
    assert checksum_of_json({"a": 1}) != checksum_of_json({"a": 2})
