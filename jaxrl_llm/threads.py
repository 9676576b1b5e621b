"""Calls of functions that others wrote, which may hang or raise anything; plain ones each in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

T = TypeVar("T")


def named(error: BaseException) -> str:
    """The type and the message of an exception, whose `__str__` may raise, too."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in its own daemon thread, which is abandoned if it hangs.

    Whatever it raises, even SystemExit or StopIteration, is a RuntimeError here that names it.
    """
    loop = asyncio.get_running_loop()
    answered: asyncio.Future[Any] = loop.create_future()

    def tell(set_it: Callable[[Any], None], value: Any) -> None:
        if not answered.done():
            set_it(value)

    def work() -> None:
        outcome: tuple[Callable[[Any], None], Any]
        try:
            outcome = answered.set_result, function(*arguments)
        except BaseException as error:
            outcome = answered.set_exception, RuntimeError(named(error))
        with contextlib.suppress(RuntimeError):  # the event loop is closed: the result is no longer needed
            loop.call_soon_threadsafe(tell, *outcome)

    threading.Thread(target=work, daemon=True, name="rollout call").start()
    return await answered


async def contained(work: Awaitable[T]) -> T:
    """Await what others wrote.

    In a coroutine, SystemExit and its like would end the event loop, and with it the run; CancelledError would pass for
    a cancellation of the task, and TimeoutError for a limit of ours. They are RuntimeErrors here that name them.
    """
    try:
        return await work
    except GeneratorExit:  # the coroutine is closed
        raise
    except BaseException as error:
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        if isinstance(error, Exception) and not isinstance(error, TimeoutError):
            raise
        raise RuntimeError(named(error)) from None


async def called(method: Callable[..., Any], *arguments: Any) -> Any:
    """What a plain or async function returns. Plain ones run in a thread, see `in_thread`; others see `contained`."""
    if inspect.iscoroutinefunction(method):
        return await contained(method(*arguments))
    found = await in_thread(method, *arguments)
    return await contained(found) if inspect.isawaitable(found) else found
