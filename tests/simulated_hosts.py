"""Several hosts as threads of one process, which exchange values through memory."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jaxrl_llm.distributed.hosts import Hosts

T = TypeVar("T")


def on_hosts(count: int, run: Callable[[Hosts], T], together: int = 1) -> list[T]:
    """run(hosts) of each of `count` hosts, at the same time, in units of `together`.

    A test in which they wait for each other forever fails.
    """
    barriers = [threading.Barrier(count, timeout=30)]
    barriers += [threading.Barrier(together, timeout=30) for _ in range(count // together)]
    values = [b""] * count

    def host(index: int) -> T:
        first = index // together * together

        def gather(value: Any, barrier: threading.Barrier = barriers[0], others: slice = slice(None)) -> list[Any]:
            values[index] = pickle.dumps(value)
            barrier.wait()
            found = [pickle.loads(one) for one in values[others]]
            barrier.wait()
            return found

        def gather_in_unit(value: Any) -> list[Any]:
            return gather(value, barriers[1 + index // together], slice(first, first + together))

        try:
            return run(Hosts(index, count, gather, together, gather_in_unit))
        except BaseException:
            for barrier in barriers:
                barrier.abort()
            raise

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(host, range(count)))
