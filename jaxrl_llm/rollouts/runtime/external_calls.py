"""External calls of programs: at which decode step their answers count.

An answer counts a fixed number of decode steps after its call. If it comes earlier, it is held back until then; if it
comes later, decoding waits for it there. So other conversations go on while an environment works, and which requests
are decoded together, and with that every bit of a run, does not depend on how long environments and rewards take.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from jaxrl_llm.core.rollout import AHEAD

T = TypeVar("T")


@dataclass(eq=False)
class _Call:
    due: int
    released: asyncio.Future[None]
    answered: bool = False


class OutsideCalls:
    """The calls that programs wait for.

    ahead: decode steps after which an answer counts. None: when it comes, if it is noticed, so that nothing waits; then
    tokens are still the same in every run, but not the last bits of their log-probabilities. moved: called when an
    answer comes, or a program gets one.
    """

    def __init__(self, ahead: int | None, moved: Callable[[], None]) -> None:
        self.ahead, self.moved = ahead, moved
        self.clock = 0  # decode steps so far, plus those that were skipped because nothing was left to decode
        self._calls: list[_Call] = []
        self._over = False

    async def made(self, work: Awaitable[T], known: bool = False) -> T:
        """What the work returns or raises, when it counts. known: made again for its state only; it counts at once."""
        due = self.clock + (0 if known or self.ahead is None else self.ahead)
        call = _Call(due, asyncio.get_running_loop().create_future())
        self._calls.append(call)
        try:
            try:
                found = await work
            except Exception:
                await self._held(call)
                raise
            await self._held(call)
            return found
        finally:
            if call in self._calls:  # it was cancelled
                self._calls.remove(call)

    async def _held(self, call: _Call) -> None:
        if self._over:  # a call that was cancelled, whose failure is its answer
            return
        call.answered = True
        self.moved()
        await call.released

    def end(self) -> None:
        """Hold no answer back any more, since the programs are cancelled."""
        self._over = True
        for call in self._calls:
            if not call.released.done():
                call.released.set_result(None)

    @property
    def waits(self) -> bool:
        """Whether a program waits for an answer."""
        return bool(self._calls)

    def steps(self, most: int) -> int:
        """Steps, of at most `most`, until the next answer counts."""
        if not self._calls:
            return most
        return min(most, AHEAD if self.ahead is None else min(call.due for call in self._calls) - self.clock)

    def release(self, idle: bool) -> bool | None:
        """Give programs the answers that count now. idle: nothing is left to decode, so that those of the next step do.

        True if there were some, False if one must be waited for, None if decoding can go on.
        """
        now = [call for call in self._calls if call.answered]
        if self.ahead is not None and self._calls:
            due = min(call.due for call in self._calls)
            if due > self.clock and not idle:
                return None
            self.clock = max(self.clock, due)
            now = [call for call in self._calls if call.due <= self.clock]
            if not all(call.answered for call in now):
                return False
        for call in now:
            self._calls.remove(call)
            call.released.set_result(None)
            self.moved()
        return True if now else False if idle and self._calls else None
