"""Time of the sandbox: a start over plain Python, and rewards of code: python experiments/benchmarks/sandbox.py

Everything runs on one core. Of a layer's starts, and of blocks of rewards, the fastest counts, because other programs
may run beside them; plain Python takes its turn among them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from jaxrl_llm.environments.sandbox import LAYERS, Session, available, run_code
from jaxrl_llm.rewards import code as rewards

# Programs as models write them: a definition, with a few calls or a run as tests.
PROGRAMS: list[tuple[str, list[object]]] = [
    ("def add(a, b):\n    return a + b\n", [f"assert add({n}, 2) == {n + 2}" for n in range(5)]),
    (
        "import math\n\n\ndef primes(n):\n    return [k for k in range(2, n) if all(k % d for d in range(2, "
        "math.isqrt(k) + 1))]\n",
        [{"call": "len(primes(1000))", "value": 168}, "assert primes(10) == [2, 3, 5, 7]"],
    ),
    ("print(sum(map(int, input().split())))\n", [{"stdin": "1 2 3\n", "stdout": "6"}]),
]


def timed(function: Callable[[], object]) -> float:
    """Seconds of a call."""
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def plain() -> None:
    """A start of Python with nothing around it."""
    python = os.path.realpath(sys.executable)
    subprocess.run([python, "-P", "-s", "-S", "-c", "pass"], capture_output=True, check=True)


def starts(repeats: int) -> None:
    """A start with each set of layers."""
    held = available()
    kinds: dict[str, Callable[[], object]] = {"plain Python": plain}
    sets: list[Sequence[str]] = [(), *[(layer,) for layer in LAYERS if layer in held], sorted(held)]
    for layers in sets:
        name = "all layers" if len(layers) > 1 else (layers[0] if layers else "the child, no layer")
        kinds[name] = lambda layers=layers: run_code("pass", layers=layers, weak=True)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for _ in range(repeats):
        for name, start in kinds.items():
            times[name].append(timed(start))
    base = min(times["plain Python"])
    print(f"{'start':24}{'ms':>8}{'over plain':>12}{'ratio':>8}")
    for name, found in times.items():
        best = min(found)
        print(f"{name:24}{1000 * best:8.1f}{1000 * (best - base):12.1f}{best / base:8.2f}")
    session = Session()
    session.run("pass")
    print(f"{'a block of a session':24}{1000 * min(timed(lambda: session.run('pass')) for _ in range(repeats)):8.2f}")
    session.close()


def rewarded() -> None:
    """A reward of each program."""
    function = rewards.code_tests("tests")
    found = function([f"```python\n{code}```" for code, _ in PROGRAMS], tests=[tests for _, tests in PROGRAMS])
    assert found["reward"] == [1.0] * len(PROGRAMS)


def unguarded() -> None:
    """The same programs and calls in plain Python, which tells nothing about results."""
    python = os.path.realpath(sys.executable)
    for code, tests in PROGRAMS:
        calls = [rewards.case_of(one) for one in tests]
        text = code + "\n".join(f"print(repr({one.call}))" for one in calls if one.call is not None)
        told = "".join(one.stdin for one in calls).encode()
        subprocess.run([python, "-P", "-s", "-S", "-c", text], input=told, capture_output=True, check=True)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=40)
    repeats = parser.parse_args().repeats
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    print(f"layers that hold here: {', '.join(layer for layer in LAYERS if layer in available())}")
    starts(repeats)
    rewarded()
    pairs = [(timed(unguarded), timed(rewarded)) for _ in range(repeats)]
    a_minute = [60 * len(PROGRAMS) / min(times) for times in zip(*pairs, strict=True)]
    slowest = 60 * len(PROGRAMS) / max(held for _, held in pairs)
    print(f"code rewards a minute on one core: {a_minute[1]:.0f} with all layers ({slowest:.0f} in the slowest block), "
          f"{a_minute[0]:.0f} in plain Python, ratio {a_minute[1] / a_minute[0]:.2f}")  # fmt: skip


if __name__ == "__main__":
    main()
