"""Code that is right and fast: levels of correctness, and a bonus for the time that it takes.

The idea of ACECode (2412.17264): one reward from running the code, in steps, that values speed once the code is right.
Neither paper nor card was at hand: levels and bonus are ours. Here: functions of lists and numbers, whose values are
compared outside of the sandbox, and whose time is that of a program with a long call less that of one without.
"""

from __future__ import annotations

import ast
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from experiments.recipes.recipe import Row, config_of, main
from jaxrl_llm.environments.sandbox import Limits, run_code
from jaxrl_llm.rewards.code import code_in, code_tests
from jaxrl_llm.rewards.verifiers import text_of
from jaxrl_llm.training.config import TrainConfig

NO_CODE, WRONG = -1.0, -0.5  # of code that does not parse; of values that are wrong, less for each that is right
MOST = 4.0  # times as fast as the reference, above which nothing more is gained
LIMITS = Limits(seconds=10.0, memory=512, output=2**16)


class Task(NamedTuple):
    """A function to write."""

    name: str
    what: str
    reference: str
    timed: str  # a call that takes the reference a while
    tests: tuple[tuple[str, Any], ...]


TASKS = (
    Task(
        "pairs_with_sum", "counts the pairs i < j with xs[i] + xs[j] == s",
        "def pairs_with_sum(xs, s):\n"
        "    return sum(xs[i] + xs[j] == s for i in range(len(xs)) for j in range(i + 1, len(xs)))\n",
        "pairs_with_sum(list(range(2000)), 2000)",
        (("pairs_with_sum([1, 2, 3, 4], 5)", 2), ("pairs_with_sum([1, 1, 1], 2)", 3), ("pairs_with_sum([], 0)", 0)),
    ),
    Task(
        "primes_below", "gives the list of primes below n",
        "def primes_below(n):\n    return [k for k in range(2, n) if all(k % d for d in range(2, k))]\n",
        "primes_below(5000)", (("primes_below(10)", [2, 3, 5, 7]), ("primes_below(2)", [])),
    ),
    Task(
        "fib", "gives the n-th Fibonacci number, with fib(0) = 0 and fib(1) = 1",
        "def fib(n):\n    return n if n < 2 else fib(n - 1) + fib(n - 2)\n",
        "fib(30)", (("fib(0)", 0), ("fib(1)", 1), ("fib(10)", 55)),
    ),
)  # fmt: skip


def rows(seed: int, count: int) -> list[Row]:
    """Rows of the tasks, in words that vary."""
    chosen, out = random.Random(seed), []
    asks = "Write a Python function {} that {}. It should be fast.", "Implement {} in Python: it {}. Make it quick."
    for number in range(count):
        task = TASKS[number % len(TASKS)]
        signature = task.reference.split("def ")[1].split(":")[0]
        prompt = chosen.choice(asks).format(signature, task.what) + " Answer with a block of code."
        tests = [{"call": call, "value": value} for call, value in task.tests]
        out.append({"prompt": prompt, "reference": task.reference, "timed": task.timed, "tests": tests})
    return out


def seconds_of(code: str, call: str) -> float:
    """Seconds of a call: of a program with it, less one without. Infinite where the program fails or is stopped."""
    whole, alone = (run_code(f"{code}\n{more}\n", limits=LIMITS) for more in (call, ""))
    failed = whole.status != 0 or whole.stopped is not None
    return math.inf if failed else max(whole.seconds - alone.seconds, 1e-4)


def bonus(plain: float, own: float) -> float:
    """0 for code as fast as the reference or slower, 1 for code that is MOST times as fast or more.

    >>> bonus(1.0, 2.0), round(bonus(1.0, 0.5), 3), bonus(1.0, 0.01)
    (0.0, 0.5, 1.0)
    """
    return min(max(math.log(plain / own) / math.log(MOST), 0.0), 1.0) if own < math.inf else 0.0


def efficiency(
    completions: Sequence[Any], reference: Sequence[str], timed: Sequence[str], tests: Sequence[Any], **_: Any
) -> list[float]:
    """NO_CODE; WRONG and 0.4 for the share of tests that pass; 1 where all pass, and `bonus`."""
    shares, known, out = code_tests()(completions, tests=tests)["reward"], dict[str, float](), []
    for text, plain, call, share in zip(completions, reference, timed, shares, strict=True):
        code = code_in(text_of(text))
        if not parses(code):
            out.append(NO_CODE)
        elif share < 1:
            out.append(WRONG + 0.4 * share)
        else:
            known.setdefault(call, seconds_of(plain, call))
            out.append(1.0 + bonus(known[call], seconds_of(code, call)))
    return out


def parses(code: str) -> bool:
    """Whether a text is a module with a function in it."""
    try:
        return any(isinstance(one, ast.FunctionDef) for one in ast.parse(code).body)
    except (SyntaxError, ValueError, RecursionError):
        return False


def config(folder: Path, model: str, rows: list[Row], **settings: Any) -> TrainConfig:
    """The run. A reward takes seconds: the time limit is larger than usual."""
    reward = f"{Path(__file__).resolve()}:efficiency"
    return config_of(folder, model, rows, [reward], **{"reward_time_limit": 300.0, **settings})


if __name__ == "__main__":
    main(__doc__, rows, config)
