"""The prompt stream: epochs are permutations, and a saved state continues as if nothing had happened."""

from __future__ import annotations

import doctest
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.data import PromptStream, stream
from jaxrl_llm.utils.errors import InputError


def rows_of(count: int) -> list[dict]:
    return [{"prompt": f"prompt {index}", "answer": index} for index in range(count)]


def ids(batches: PromptStream, count: int) -> list[list[int]]:
    return [next(batches)[1].tolist() for _ in range(count)]


def test_examples_in_docstrings() -> None:
    assert doctest.testmod(stream) == (0, 3)


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
    "change",
    [
        {"position": None},
        {"position": 3},
        {"position": []},
        {"position": {}},
        {"position": {"next_index": "1"}},
        {"position": {"next_index": 1.5}},
        {"position": {"next_index": True}},
        {"position": {"next_index": -1}},
        {"position": {"next_index": 2**70}},
        {"position": {"other": 1}},
    ],
)
def test_a_position_of_another_kind_is_refused_and_changes_nothing(change: dict) -> None:
    batches = PromptStream(rows_of(5), batch_size=2, seed=1)
    ids(batches, 2)
    state = batches.state()
    with pytest.raises(InputError, match=r"cannot resume the prompt stream: its position is .*, but must be like"):
        batches.restore({**state, **change})
    assert batches.state() == state
    assert ids(batches, 1) == ids(PromptStream(rows_of(5), batch_size=2, seed=1), 3)[2:]


@pytest.mark.parametrize("state", [None, [], 3, "state", {}, {"rows": 5}])
def test_what_is_no_state_is_refused(state: object) -> None:
    with pytest.raises(InputError, match="cannot resume the prompt stream: "):
        PromptStream(rows_of(5), batch_size=2, seed=1).restore(state)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options, message",
    [
        ({"batch_size": 0}, "batch_size must be at least 1"),
        ({"batch_size": -2}, "batch_size must be at least 1"),
        ({"batch_size": 1.5}, r"batch_size is 1\.5, but must be a whole number"),
        ({"batch_size": 2.0}, r"batch_size is 2\.0, but must be a whole number"),
        ({"batch_size": True}, "batch_size is True"),
        ({"batch_size": None}, "batch_size is None"),
        ({"batch_size": 10**12}, "batch_size must be at least 1 and at most 16777216"),
        ({"seed": -1}, "seed must be at least 0"),
        ({"seed": 2**32}, "seed must be at least 0 and at most 4294967295"),
        ({"seed": 2**70}, "seed"),
        ({"seed": 0.5}, r"seed is 0\.5"),
        ({"shuffle": "no"}, "shuffle is 'no', but must be True or False"),
        ({"rows": []}, "no rows"),
        ({"rows": None}, "rows is None, but must be a list of dicts"),
        ({"rows": "ab"}, "rows is str 'ab', but must be a list of dicts"),
        ({"rows": [{"prompt": "a"}, "b"]}, r"rows\[1\] is str 'b', but must be a dict"),
    ],
)
def test_bad_arguments(options: dict, message: str) -> None:
    arguments = {"rows": rows_of(2), "batch_size": 1, "seed": 0, **options}
    with pytest.raises(InputError, match=message):
        PromptStream(arguments.pop("rows"), **arguments)


def test_whole_numbers_of_numpy_are_taken() -> None:
    batches = PromptStream(rows_of(5), batch_size=np.int64(2), seed=np.uint32(1))  # type: ignore[arg-type]
    assert json.loads(json.dumps(batches.state()))["batch_size"] == 2
