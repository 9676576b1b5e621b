"""Rewards of code: the completion's program runs in the sandbox, and what it computes is compared outside of it.

The sandbox knows the questions but not the answers, so that no trick within it, such as an `__eq__` that is always
true, a patched assert or a clean exit, passes a test.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from jaxrl_llm.environments.sandbox import Limits, available, require_guards, run_code
from jaxrl_llm.errors import InputError, shown
from jaxrl_llm.rewards.entries import REWARD
from jaxrl_llm.rewards.verifiers import text_of

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
LIMITS = Limits(seconds=6.0, memory=512, output=2**16)
WORKERS = 2  # programs at once

# Calls are evaluated one by one, so that one that fails leaves the others; their values are written as JSON lines.
_CALLS = """
import json as {json}
for {n}, {text} in enumerate({calls}):
    try:
        {value} = repr(eval({text}, globals()))
    except BaseException as {error}:
        {value} = None
    print("\\n" + {mark!r} + {json}.dumps([{n}, {value}]), flush=True)
"""


class Case(NamedTuple):
    """One test: an expression and its value, or what a program reads and what it has to write."""

    call: str | None
    value: Any
    stdin: str = ""


def case_of(given: Any) -> Case:
    """A test from a row of the data set.

    given: {"stdin": text, "stdout": text}; {"call": expression, "value": value}; or the text of an assertion that an
    expression equals a literal, `assert f(1) == 2`. InputError for anything else.

    >>> case_of("assert add(1, 2) == 3")
    Case(call='add(1, 2)', value=3, stdin='')
    """
    if isinstance(given, Mapping) and "stdout" in given:
        return Case(None, str(given["stdout"]), str(given.get("stdin", "")))
    if isinstance(given, Mapping) and {"call", "value"} <= given.keys():
        return Case(str(given["call"]), given["value"])
    if isinstance(given, str):
        try:
            (line,) = ast.parse(given.strip()).body
            assert isinstance(line, ast.Assert)
            assert isinstance(line.test, ast.Compare)
            assert isinstance(line.test.ops[0], ast.Eq)
            return Case(ast.unparse(line.test.left), ast.literal_eval(line.test.comparators[0]))
        except (SyntaxError, ValueError, AssertionError):
            pass
    raise InputError(
        f"a test is {shown(given)}, but must be {{'stdin', 'stdout'}}, {{'call', 'value'}} or 'assert CALL == LITERAL'"
    )


def code_in(text: str) -> str:
    """The last fenced block of a text, else the text.

    >>> code_in("So:\\n```python\\nprint(1)\\n```\\nDone.")
    'print(1)\\n'
    """
    blocks = _BLOCK.findall(text)
    return str(blocks[-1]) if blocks else text


def passed(code: str, tests: Sequence[Case], limits: Limits = LIMITS) -> list[float]:
    """1 for each test that the program passes, 0 for the others. All calls are made in one run of the program."""
    out = [0.0] * len(tests)
    calls = {place: test for place, test in enumerate(tests) if test.call is not None}
    if calls:
        for place, text in zip(calls, _values(code, [str(test.call) for test in calls.values()], limits), strict=True):
            out[place] = float(text is not None and _equal(text, calls[place].value))
    for place, test in enumerate(tests):
        if test.call is None:
            found = run_code(code, test.stdin, limits=limits)
            same = [line.rstrip() for line in found.stdout.rstrip().splitlines()]
            wanted = [line.rstrip() for line in str(test.value).rstrip().splitlines()]
            out[place] = float(found.status == 0 and same == wanted)
    return out


def _values(code: str, calls: list[str], limits: Limits) -> list[str | None]:
    """What the calls evaluate to, as Python writes it; None where one fails or is not reached."""
    own = secrets.token_hex(8)  # names that the program does not have
    names = {name: f"_{name}_{own}" for name in ("json", "n", "text", "value", "error")}
    found = run_code(code + "\n" + _CALLS.format(calls=calls, mark=own, **names), limits=limits)
    out: list[str | None] = [None] * len(calls)
    for line in found.stdout.splitlines():
        if line.startswith(own):
            try:
                place, value = json.loads(line[len(own) :])
                out[place] = value
            except (ValueError, TypeError, IndexError):
                continue
    return out


def _equal(text: str, wanted: Any) -> bool:
    """Whether a value, as Python writes it, is the one that is wanted; numbers to nine digits, tuples as lists."""
    try:
        return _alike(ast.literal_eval(text), wanted)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return False


def _alike(found: Any, wanted: Any) -> bool:
    if isinstance(found, list | tuple) and isinstance(wanted, list | tuple):
        return len(found) == len(wanted) and all(map(_alike, found, wanted))
    if isinstance(found, dict) and isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(_alike(found[name], wanted[name]) for name in found)
    if isinstance(found, float) or isinstance(wanted, float):
        numbers = isinstance(found, int | float) and isinstance(wanted, int | float)
        return numbers and math.isclose(found, wanted, rel_tol=1e-9, abs_tol=1e-9)
    return type(found) is type(wanted) and bool(found == wanted)


def code_tests(column: str = "tests") -> Callable[..., Any]:
    """A reward: the share of tests that the completion's program passes, with their results as the entry "tests".

    column: of the data set, a list of tests for each prompt; see `case_of`. Programs run in the sandbox, two at once.

    Raises InputError for a name that is no column's, and where too few layers of the sandbox hold.
    """
    if not column.isidentifier():
        raise InputError(f"code_tests({column}) names no column: give the name of a column of the data set")
    require_guards(available())

    def code_tests(completions: Sequence[Any], **columns: Any) -> dict[str, list[Any]]:
        tests = [[case_of(one) for one in row] for row in columns[column]]
        codes = [code_in(text_of(completion)) for completion in completions]
        with ThreadPoolExecutor(WORKERS) as pool:
            results = list(pool.map(passed, codes, tests))
        return {REWARD: [sum(one) / max(len(one), 1) for one in results], "tests": results}

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    code_tests.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("completions", kind), inspect.Parameter(column, kind)]
    )
    code_tests.provides = frozenset({"tests"})  # type: ignore[attr-defined]
    code_tests.own_limits = True  # type: ignore[attr-defined]  # those of the sandbox; see `limits`
    return code_tests
