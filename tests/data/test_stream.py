"""The prompt stream: epochs are permutations, and a saved state continues as if nothing had happened."""

from __future__ import annotations

import doctest
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.data import PromptStream, stream
from jaxrl_llm.errors import InputError


def rows_of(count: int) -> list[dict]:
    return [{"prompt": f"prompt {index}", "answer": index} for index in range(count)]


def ids(batches: PromptStream, count: int) -> list[list[int]]:
    return [next(batches)[1].tolist() for _ in range(count)]


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(stream) == (0, 2)


@given(st.integers(1, 12), st.integers(1, 17), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_every_epoch_is_a_permutation_whatever_the_batch_size(count: int, batch_size: int, seed: int) -> None:
    batches = PromptStream(rows_of(count), batch_size=batch_size, seed=seed)
    drawn = np.concatenate([next(batches)[1] for _ in range(-(-3 * count // batch_size))])
    for epoch in drawn[: 3 * count].reshape(3, count):
        assert sorted(epoch) == list(range(count))


def test_epochs_and_seeds_differ() -> None:
    batches = PromptStream(rows_of(50), batch_size=50, seed=1)
    first, second = ids(batches, 2)
    assert first != second
    assert first != list(range(50))
    assert ids(PromptStream(rows_of(50), batch_size=50, seed=1), 2) == [first, second]
    assert ids(PromptStream(rows_of(50), batch_size=50, seed=2), 1) != [first]


def test_batches_are_full_and_rows_go_with_their_ids() -> None:
    rows = rows_of(5)
    batches = PromptStream(rows, batch_size=3, seed=7)
    for _ in range(6):
        drawn, prompt_ids = next(batches)
        assert prompt_ids.dtype == np.int32
        assert prompt_ids.shape == (3,)
        assert drawn == [rows[index] for index in prompt_ids]


def test_without_shuffling_rows_keep_their_order() -> None:
    batches = PromptStream(rows_of(3), batch_size=2, seed=0, shuffle=False)
    assert ids(batches, 4) == [[0, 1], [2, 0], [1, 2], [0, 1]]


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 7])  # 5 rows by 2: an epoch ends inside the third batch
def test_a_restored_stream_continues_identically(taken: int) -> None:
    original = PromptStream(rows_of(5), batch_size=2, seed=11)
    ids(original, taken)
    state = json.loads(json.dumps(original.state()))
    expected = ids(original, 9)
    fresh = PromptStream(rows_of(5), batch_size=2, seed=11)
    fresh.restore(state)
    assert fresh.state() == state
    assert ids(fresh, 9) == expected
    fresh.restore(state)  # a stream that has moved on can go back, too
    assert ids(fresh, 9) == expected


def test_a_state_is_not_changed_by_later_batches() -> None:
    batches = PromptStream(rows_of(5), batch_size=2, seed=11)
    state = batches.state()
    before = json.dumps(state)
    ids(batches, 3)
    assert json.dumps(state) == before


@pytest.mark.parametrize(
    "name, other",
    [
        ("rows", PromptStream(rows_of(6), batch_size=2, seed=1)),
        ("batch_size", PromptStream(rows_of(5), batch_size=3, seed=1)),
        ("seed", PromptStream(rows_of(5), batch_size=2, seed=2)),
        ("shuffle", PromptStream(rows_of(5), batch_size=2, seed=1, shuffle=False)),
    ],
)
def test_a_state_of_another_stream_is_refused(name: str, other: PromptStream) -> None:
    state = PromptStream(rows_of(5), batch_size=2, seed=1).state()
    with pytest.raises(InputError, match=f"cannot resume the prompt stream: {name} was"):
        other.restore(state)


@pytest.mark.parametrize(
    "options, message",
    [({"batch_size": 0}, "batch_size"), ({"seed": -1}, "seed"), ({"seed": 2**32}, "seed"), ({"rows": []}, "no rows")],
)
def test_bad_arguments(options: dict, message: str) -> None:
    arguments = {"rows": rows_of(2), "batch_size": 1, "seed": 0, **options}
    with pytest.raises(InputError, match=message):
        PromptStream(arguments.pop("rows"), **arguments)
