"""Calls of functions that others wrote, which may hang or raise anything.

Plain ones run in a thread of their own each. Async ones run in one event loop of the process, which is not that of the
rollout: a client or a lock that they keep from one step to the next stays in its loop, and one that blocks its loop
holds up no decoding.
"""

import asyncio
import contextlib
import inspect
import logging
import threading
import time
from collections.abc import Awaitable, Callable
from contextvars import copy_context
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")
logger = logging.getLogger("jaxrl_llm.rollouts")
DISPATCH = threading.Lock()
"""Held while programs that span several devices are started from threads, so that all devices get them in one order."""


class BothLocks(NamedTuple):
    """Two locks as one."""

    first: threading.Lock
    second: threading.Lock

    def __enter__(self) -> None:
        self.first.acquire()
        self.second.acquire()

    def __exit__(self, *unused: object) -> None:
        self.second.release()
        self.first.release()


BLOCKED = 10.0  # seconds without a turn after which an event loop is given up
TOLD = (
    "an async function of a tool or an environment has blocked its event loop for {:g} s, and others go on in a new "
    "one: make it a plain function, which runs in a thread, or let it await what takes long"
)


def error_in_words(error: BaseException) -> str:
    """The type and the message of an exception, whose `__str__` may raise, too."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return type(error).__name__


async def in_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in its own daemon thread, which is abandoned if it hangs, with the caller's context variables.

    Whatever it raises, even SystemExit or StopIteration, is a RuntimeError here that names it.
    """
    loop, context = asyncio.get_running_loop(), copy_context()
    answered: asyncio.Future[Any] = loop.create_future()

    def tell(set_it: Callable[[Any], None], value: Any) -> None:
        if not answered.done():
            set_it(value)

    def work() -> None:
        outcome: tuple[Callable[[Any], None], Any]
        try:
            outcome = answered.set_result, context.run(function, *arguments)
        except BaseException as error:
            outcome = answered.set_exception, RuntimeError(error_in_words(error))
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
        raise RuntimeError(error_in_words(error)) from None


class _Loop:
    """An event loop in a daemon thread."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._asked: float | None = None  # when it was asked for a sign of life that it has not given
        threading.Thread(target=self.loop.run_forever, daemon=True, name="rollout coroutines").start()

    def is_blocked(self) -> bool:
        """Whether it has not turned for `BLOCKED` seconds."""
        if self._asked is None:
            self._asked = time.monotonic()
            self.loop.call_soon_threadsafe(self._lives)
        asked = self._asked  # the loop's thread may answer at any moment
        return asked is not None and time.monotonic() - asked > BLOCKED

    def _lives(self) -> None:
        self._asked = None


_lock, _loops = threading.Lock(), list[_Loop]()


def _loop_of_others() -> asyncio.AbstractEventLoop:
    """The event loop of async functions that others wrote; another one where a function blocks it."""
    with _lock:
        if not _loops:
            _loops.append(_Loop())
        elif _loops[0].is_blocked():
            logger.warning("%s", TOLD.format(BLOCKED))
            _loops[0] = _Loop()
        return _loops[0].loop


async def _in_loop(work: Awaitable[T]) -> T:
    running = asyncio.get_running_loop()
    if any(running is one.loop for one in _loops):
        return await contained(work)
    return await contained(asyncio.wrap_future(asyncio.run_coroutine_threadsafe(contained(work), _loop_of_others())))


async def called(method: Callable[..., Any], *arguments: Any) -> Any:
    """What a plain or async function returns. It raises as `in_thread` or `contained` does.

    Async functions of this package, which call what others wrote by this one, stay in the loop of their caller.
    """
    if inspect.iscoroutinefunction(method):
        own = str(getattr(method, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]
        return await (contained if own else _in_loop)(method(*arguments))
    found = await in_thread(method, *arguments)
    return await _in_loop(found) if inspect.isawaitable(found) else found
