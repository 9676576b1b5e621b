"""Time limits of reward functions: what a call of a batch may take, and what is lost where one does not end.

A limit is that of a sample. A function is called with the whole batch, which may take `batch_limit`. If that call
fails, exceeds it or takes its process with it, the function is called again for each sample, so that only those samples
are lost on which it fails too. Functions with the attribute `per_sample` are called for each sample in the first place,
and those with `own_limits`, which end by themselves, have no limit from here.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count as numbers
from typing import Any, Protocol

from jaxrl_llm.rewards.entries import joined
from jaxrl_llm.rewards.workers.calling import Given, Lost, Outcome, all_logged, call_each, call_whole, time_limit_text

PATIENCE = 8  # limits without a scored sample, after which the rest of a batch is not tried
GRACE = 0.25  # seconds after a limit in which a call can say itself that it was exceeded


class Calls(Protocol):
    """How a function is called: in a thread or in a process. No call raises or takes much more than its limit."""

    def whole(self, seconds: float) -> Outcome | Lost:
        """Call the function once with all samples."""

    def each(self, places: Sequence[int], seconds: float, at_once: bool) -> Iterator[Outcome | Lost]:
        """Call it for each of these samples; ends after a call that did not end by itself."""


def batch_limit(limit: float, count: int) -> float:
    """Seconds that a call with `count` samples may take: the limit of one, and as much again with each doubling.

    >>> [batch_limit(10.0, count) for count in (1, 8, 1024)]
    [10.0, 40.0, 110.0]
    """
    return limit * (1 + math.log2(max(count, 1)))


def within_limits(
    calls: Calls, count: int, limit: float, per_sample: bool = False, own_limits: bool = False
) -> Outcome:
    """The outcome of a function on `count` samples; limit: seconds for each."""
    start, problem = time.monotonic(), ""
    limit = math.inf if own_limits else limit
    if not per_sample or not count:
        found = calls.whole(batch_limit(limit, count))
        if isinstance(found, Outcome):
            return found._replace(seconds=time.monotonic() - start)
        if count == 1:
            return found.outcome(1)._replace(seconds=time.monotonic() - start)
        problem = found.problem
    # Neighbours, the completions of one prompt, are apart: if all of these hang, that says nothing of the others.
    step = math.isqrt(count)
    order = [place for first in range(step) for place in range(first, count, step)]
    parts: list[Outcome] = []
    scored, tries = time.monotonic(), 0
    while len(parts) < count:
        if time.monotonic() - scored >= PATIENCE * limit:
            why = f"no sample was scored for {PATIENCE * limit:g} s, so that the rest was not tried"
            parts += [Lost(why, late=True).outcome(1)] * (count - len(parts))
            break
        for one in calls.each(order[len(parts) :], limit, tries == 0):
            if isinstance(one, Outcome):
                scored = time.monotonic()
            parts.append(one if isinstance(one, Outcome) else one.outcome(1))
            if time.monotonic() - scored >= PATIENCE * limit:
                break
        tries += 1
    parts = [part for _, part in sorted(zip(order, parts, strict=True), key=lambda one: one[0])]
    lost = [one.problem for one in parts if one.problem]
    return Outcome(
        [one.values[0] for one in parts],
        [one.failed[0] for one in parts],
        (lost or [problem])[0],
        time.monotonic() - start,
        joined((one.entries, 1) for one in parts),
        [any(one.late) for one in parts],
        all_logged((one.logged, 1) for one in parts),
    )


class ThreadCalls:
    """Calls in daemon threads of this process, which are abandoned where they do not end."""

    def __init__(
        self, function: Callable[..., Any], arguments: Mapping[str, list[Any]], count: int, given: Given
    ) -> None:
        self._function, self._arguments, self._count, self._given = function, arguments, count, given

    def whole(self, seconds: float) -> Outcome | Lost:
        # Copies, because a function may modify its lists while others read theirs.
        """See `Calls`."""
        own = {name: list(column) for name, column in self._arguments.items()}
        results: queue.SimpleQueue[Outcome | Lost] = queue.SimpleQueue()
        _in_thread(lambda: results.put(call_whole(self._function, own, self._count, seconds, self._given)))
        found = _taken(results, seconds)
        return Lost(time_limit_text(seconds), late=True) if found is None else found

    def each(self, places: Sequence[int], seconds: float, at_once: bool) -> Iterator[Outcome | Lost]:
        """See `Calls`."""
        own = {name: [column[place] for place in places] for name, column in self._arguments.items()}
        results: queue.SimpleQueue[Outcome | Lost] = queue.SimpleQueue()
        abandoned = threading.Event()

        def run() -> None:
            for one in call_each(self._function, own, len(places), seconds, self._given, at_once):
                results.put(one)
                if abandoned.is_set():
                    return

        _in_thread(run)
        try:
            for _ in places:
                if (found := _taken(results, seconds)) is None:
                    yield Lost(time_limit_text(seconds), late=True)
                    return
                yield found
        finally:
            abandoned.set()


_NUMBERS = numbers(1)


def _in_thread(function: Callable[[], None]) -> None:
    """Run a function in a daemon thread, which, unlike the pools of `concurrent.futures`, is not joined at exit."""
    threading.Thread(target=function, name=f"reward {next(_NUMBERS)}", daemon=True).start()


def _taken(results: queue.SimpleQueue[Outcome | Lost], seconds: float) -> Outcome | Lost | None:
    """The next result; None if there is none in time."""
    try:
        return results.get(timeout=None if math.isinf(seconds) else seconds + GRACE)
    except queue.Empty:
        return None
