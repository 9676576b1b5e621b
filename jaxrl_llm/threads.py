"""Calls of functions that may hang, each in a thread of its own."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import threading
from collections.abc import Callable
from typing import Any


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in its own daemon thread, which is abandoned if it hangs."""
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
            outcome = answered.set_exception, RuntimeError(f"{type(error).__name__}: {error}")
        with contextlib.suppress(RuntimeError):  # the event loop is closed: the result is no longer needed
            loop.call_soon_threadsafe(tell, *outcome)

    threading.Thread(target=work, daemon=True, name="rollout call").start()
    return await answered


async def called(method: Callable[..., Any], *arguments: Any) -> Any:
    """What a plain or async function returns. Plain ones run in a thread."""
    if inspect.iscoroutinefunction(method):
        return await method(*arguments)
    found = await in_thread(method, *arguments)
    return await found if inspect.isawaitable(found) else found
