"""Async functions of others run in a loop of their own, which they may block without holding up anything else."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import Any

import pytest

from jaxrl_llm.utils import threads
from jaxrl_llm.utils.threads import called, contained


@pytest.fixture(autouse=True)
def own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_loops", [])


async def loop_of(value: int) -> tuple[int, int]:
    await asyncio.sleep(0)
    return value, id(asyncio.get_running_loop())


def test_what_they_keep_stays_in_its_loop() -> None:
    """Rollouts run in a new event loop with each step; a lock that several wait for belongs to one loop."""
    lock = asyncio.Lock()

    async def alone(value: int) -> int:
        async with lock:
            await asyncio.sleep(0.001)
        return value

    async def step() -> list[Any]:
        return await asyncio.gather(*(called(alone, value) for value in range(3)), called(loop_of, 3))

    first, second = asyncio.run(step()), asyncio.run(step())
    assert first == second
    assert first[:3] == [0, 1, 2]


def test_a_call_within_a_call_is_in_the_same_loop() -> None:
    async def outer() -> tuple[Any, int]:
        return await called(loop_of, 1), id(asyncio.get_running_loop())

    (value, inner), outer_loop = asyncio.run(called(outer))
    assert (value, inner) == (1, outer_loop)


def test_one_that_blocks_holds_up_neither_the_caller_nor_the_next_ones(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(threads, "BLOCKED", 0.1)

    async def blocks() -> None:
        time.sleep(3.0)

    async def main() -> float:
        began = time.monotonic()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(called(blocks), 0.1)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(called(loop_of, 1), 0.15)
        assert (await called(loop_of, 2))[0] == 2
        return time.monotonic() - began

    assert asyncio.run(main()) < 2.5
    assert [record.getMessage()[:55] for record in caplog.records] == [
        "an async function of a tool or an environment has blocke"[:55]
    ]


def test_one_that_ignores_its_end_is_left_behind() -> None:
    async def stubborn() -> None:
        end = time.monotonic() + 3.0
        while time.monotonic() < end:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(0.3)

    began = time.monotonic()
    with pytest.raises(TimeoutError):
        asyncio.run(asyncio.wait_for(called(stubborn), 0.1))
    assert time.monotonic() - began < 2.5


def test_one_that_cancels_itself_cancels_nobody_else() -> None:
    async def cancels() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(1.0)

    with pytest.raises(RuntimeError, match="CancelledError"):
        asyncio.run(called(cancels))


def test_a_cancellation_from_outside_is_one() -> None:
    async def main() -> bool:
        task = asyncio.ensure_future(contained(asyncio.sleep(1.0)))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return task.cancelled()

    assert asyncio.run(main())
