"""Time limits of reward functions: what a call of a batch may take, and what is lost where one does not end.

A limit is that of a sample. A function is called with the whole batch, which may take `batch_limit`. If that call
fails, exceeds it or takes its process with it, the function is called again for each sample, so that only those samples
are lost on which it fails too. Functions with the attribute `per_sample` are called for each sample in the first place,
and those with `own_limits`, which end by themselves, have no limit from here.
"""

import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count as numbers
from typing import Any

from jaxrl_llm.rewards.entries import concatenate_entries
from jaxrl_llm.rewards.workers.calling import CallInfo, CallMode, CallOutcome, Lost, all_logged, time_limit_text
from jaxrl_llm.rewards.workers.calling import calls as calls_of

PATIENCE = 8  # limits without a scored sample, after which the rest of a batch is not tried
GRACE = 0.25  # seconds after a limit in which a call can say itself that it was exceeded


Calls = Callable[[Sequence[int], CallMode], Iterator[CallOutcome | Lost]]
"""(samples, how) -> what the calls give, in order; ends after one that did not end by itself.

The function is called in a thread or in a process. No call raises, or takes much more than its limit."""


def batch_limit(limit: float, count: int) -> float:
    """Seconds that a call with `count` samples may take: the limit of one, and as much again with each doubling.

    >>> [batch_limit(10.0, count) for count in (1, 8, 1024)]
    [10.0, 40.0, 110.0]
    """
    return limit * (1 + math.log2(max(count, 1)))


def within_limits(
    calls: Calls, count: int, limit: float, per_sample: bool = False, own_limits: bool = False
) -> CallOutcome:
    """The outcome of a function on `count` samples; limit: seconds for each."""
    start, problem = time.monotonic(), ""
    limit = math.inf if own_limits else limit
    if not per_sample or not count:
        found = next(calls(range(count), CallMode(batch_limit(limit, count))))
        if isinstance(found, CallOutcome):
            return found._replace(seconds=time.monotonic() - start)
        if count == 1:
            return found.outcome(1)._replace(seconds=time.monotonic() - start)
        problem = found.problem
    # Neighbours, the completions of one prompt, are apart: if all of these hang, that says nothing of the others.
    step = math.isqrt(count)
    order = [place for first in range(step) for place in range(first, count, step)]
    parts: list[CallOutcome] = []
    scored, tries = time.monotonic(), 0
    while len(parts) < count:
        if time.monotonic() - scored >= PATIENCE * limit:
            why = f"no sample was scored for {PATIENCE * limit:g} s, so that the rest was not tried"
            parts += [Lost(why, late=True).outcome(1)] * (count - len(parts))
            break
        for one in calls(order[len(parts) :], CallMode(limit, each=True, at_once=tries == 0)):
            if isinstance(one, CallOutcome):
                scored = time.monotonic()
            parts.append(one if isinstance(one, CallOutcome) else one.outcome(1))
            if time.monotonic() - scored >= PATIENCE * limit:
                break
        tries += 1
    parts = [part for _, part in sorted(zip(order, parts, strict=True), key=lambda one: one[0])]
    lost = [one.problem for one in parts if one.problem]
    return CallOutcome(
        [one.values[0] for one in parts],
        [one.failed[0] for one in parts],
        (lost or [problem])[0],
        time.monotonic() - start,
        concatenate_entries((one.entries, 1) for one in parts),
        [any(one.late) for one in parts],
        all_logged((one.logged, 1) for one in parts),
    )


_NUMBERS = numbers(1)


def thread_calls(
    function: Callable[..., Any],
    arguments: Mapping[str, list[Any]],
    given: CallInfo,
    places: Sequence[int],
    how: CallMode,
) -> Iterator[CallOutcome | Lost]:
    """`Calls` in daemon threads of this process, which are abandoned where they do not end."""
    # Copies, because a function may modify its lists while others read theirs.
    own = {name: [column[place] for place in places] for name, column in arguments.items()}
    results: queue.SimpleQueue[CallOutcome | Lost] = queue.SimpleQueue()
    abandoned = threading.Event()

    def run() -> None:
        for one in calls_of(function, own, len(places), given, how):
            results.put(one)
            if abandoned.is_set():
                return

    # Unlike the pools of `concurrent.futures`, a daemon thread is not joined at exit.
    threading.Thread(target=run, name=f"reward {next(_NUMBERS)}", daemon=True).start()
    try:
        for _ in places if how.each else range(1):
            yield results.get(timeout=None if math.isinf(how.seconds) else how.seconds + GRACE)
    except queue.Empty:
        yield Lost(time_limit_text(how.seconds), late=True)
    finally:
        abandoned.set()
