"""Several hosts as threads of one process, which exchange values through memory."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from jaxrl_llm.distributed.hosts import Hosts

T = TypeVar("T")


def on_hosts(count: int, run: Callable[[Hosts], T]) -> list[T]:
    """run(hosts) of each of `count` hosts, at the same time. A test in which they wait for each other forever fails."""
    barrier, values = threading.Barrier(count, timeout=30), [b""] * count

    def host(index: int) -> T:
        def gather(value: Any) -> list[Any]:
            values[index] = pickle.dumps(value)
            barrier.wait()
            found = [pickle.loads(one) for one in values]
            barrier.wait()
            return found

        try:
            return run(Hosts(index, count, gather))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(host, range(count)))
