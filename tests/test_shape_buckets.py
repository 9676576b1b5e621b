"""Sizes from a short list, and rows padded to them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_llm.core.shapes import bucket, pad_rows


def test_the_list() -> None:
    sizes = sorted({bucket(n) for n in range(1, 65)})
    assert sizes == [8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64]
    assert [bucket(n, least=2) for n in range(10)] == [2, 2, 2, 3, 4, 5, 6, 7, 8, 10]
    assert [bucket(n, least=1) for n in (0, 1, 2, 3)] == [1, 1, 2, 3]


@given(length=st.integers(0, 200_000), least=st.sampled_from([1, 2, 8, 64]))
def test_a_bucket_holds_its_length(length: int, least: int) -> None:
    size = bucket(length, least)
    assert size >= max(length, least)
    assert bucket(size, least) == size
    assert bucket(length + 1, least) >= size
    if size > least:
        assert 4 * (size - length) < size
        assert bucket(length, least) == size


def test_four_sizes_an_octave() -> None:
    assert len({bucket(n) for n in range(1025, 2049)}) == 4


def test_pad_rows() -> None:
    tokens, mask = pad_rows([[5, 0, 7], [], [9]], 4)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == [[5, 0, 7, 0], [0, 0, 0, 0], [9, 0, 0, 0]]
    assert mask.tolist() == [[True, True, True, False], [False] * 4, [True, False, False, False]]


def test_rows_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="shape"):
        pad_rows([[1, 2, 3]], 2)
