"""The process of each column of the rollout benchmark: it answers tasks, one JSON line each.

Uses only the standard library, since other libraries' columns run in their own environments.
"""

from __future__ import annotations

import json
import os
import random
import resource
import sys
from collections.abc import Callable
from typing import Any

COMPILED = "/jax/core/compile/backend_compile_duration"  # JAX's event: a program was compiled, or fetched from a cache

Task = Callable[..., dict[str, Any]]


def random_prompts(count: int, length: int, vocabulary: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `length` token ids in [10, vocabulary), the same in every column."""
    number = random.Random(seed)
    return [[number.randrange(10, vocabulary) for _ in range(length)] for _ in range(count)]


def peak_memory() -> int:
    """Bytes of memory that this process had at most."""
    try:
        with open("/proc/self/status") as status:
            line = next(line for line in status if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    except (OSError, StopIteration):
        # Elsewhere the figure may include the parent's peak, which is small.
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def serve(tasks: dict[str, Task]) -> None:
    """Answer lines {"task": name, argument: value ...} of standard input until it ends.

    What libraries print goes to standard error. An answer without "peak_bytes" gets that of the process.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        asked = json.loads(line)
        answer = tasks[asked.pop("task")](**asked)
        answer.setdefault("peak_bytes", peak_memory())
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
