"""The simulation of asynchronous runs: cases that are known in closed form, and the bound."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "experiments/benchmarks"
NAMES = ("asynchronous", "rollout_tail", "rollout_worker")
SAMPLES, GROUPS, STEPS = 2, 4, 12


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    """The benchmark, as it is when it is started as a script."""
    sys.path.insert(0, str(FOLDER))
    try:
        yield importlib.import_module("asynchronous")
    finally:
        sys.path.remove(str(FOLDER))
        for name in NAMES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def even(bench: Any) -> Any:
    """8 rows, a step's completions; a decode step takes 0.1 s and an update 2 s."""
    return bench.Machine(decode=0.1, row=0, update=2.0, transfer=0, prefill=0, rows=8)


@pytest.mark.parametrize("length", [10, 20, 40])
@pytest.mark.parametrize("bound", [0, 1, 2])
def test_equal_lengths_take_the_sum_or_the_larger(bench: Any, even: Any, length: int, bound: int) -> None:
    sampling = 0.1 * length
    found = bench.simulate(even, [length] * (SAMPLES * GROUPS * STEPS), SAMPLES, GROUPS, bound)
    assert found.seconds == pytest.approx(max(sampling, 2.0) if bound else sampling + 2.0)
    if not bound:
        assert found.waited == pytest.approx(sampling)


def test_hosts_share_the_rows_and_a_split_slows_both(bench: Any, even: Any) -> None:
    two, lengths = bench.Machine(0.1, 0, 2.0, 0, 0, rows=4, hosts=2), [20] * (SAMPLES * GROUPS * STEPS)
    assert bench.simulate(two, lengths, SAMPLES, GROUPS, 1).seconds == pytest.approx(2.0)
    assert bench.simulate(even.split(0.25), lengths, SAMPLES, GROUPS, 1).seconds == pytest.approx(8.0), "sampling alone"
    assert even.ideal(lengths, STEPS) == pytest.approx((2.0, 2.0))


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_every_group_is_taken_once_and_none_is_too_old(bench: Any, even: Any, bound: int) -> None:
    lengths = bench.tail_limits(SAMPLES * GROUPS * STEPS, median=20, longest=8, seed=3)
    found = bench.simulate(even, lengths, SAMPLES, GROUPS, bound)
    every = [key for keys in found.taken for key in keys]
    assert [len(keys) for keys in found.taken] == [GROUPS] * STEPS
    assert len(set(every)) == len(every)
    assert found.oldest <= bound
    assert found.staleness <= bound


def test_a_long_tail_is_hidden(bench: Any, even: Any) -> None:
    """Alone, the longest completion of a step sets its time."""
    lengths = bench.tail_limits(SAMPLES * GROUPS * 4 * STEPS, median=20, longest=8, seed=3)
    ideal = max(even.ideal(lengths, 4 * STEPS))
    beside, alone = (bench.simulate(even, lengths, SAMPLES, GROUPS, bound).seconds for bound in (4, 0))
    assert beside < 1.15 * ideal
    assert alone > 1.7 * ideal
