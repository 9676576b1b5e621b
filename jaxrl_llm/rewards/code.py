"""Rewards of code: the completion's program runs in the sandbox, and what it computes is compared outside of it.

The sandbox knows the questions but not the answers, so that no trick within it, such as an `__eq__` that is always
true, a patched assert or a clean exit, passes a test.
"""

import ast
import inspect
import json
import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, NamedTuple

from jaxrl_llm.environments.sandbox import Limits, available, require_guards, run_code
from jaxrl_llm.rewards.entries import REWARD
from jaxrl_llm.rewards.parsing.code_blocks import KNOWN, code_in, syntax_tree
from jaxrl_llm.rewards.parsing.code_values import WRITER, built, equal, literal_value
from jaxrl_llm.rewards.verifiers import text_of
from jaxrl_llm.utils.errors import InputError, shown

__all__ = ["Case", "case_of", "code_in", "code_tests", "passed"]

LIMITS = Limits(seconds=6.0, memory=512, output=2**16)
VALUES = 2**20  # bytes of the values of all calls
WORKERS = 2  # programs at once
OVER = 3  # runs of a program that exceed a limit, after which the tests that are left have failed

# The program is a module of its own, so that neither its names nor what it prints meet those of the tests. Calls are
# evaluated one by one, so that one that fails leaves the others; their values are written as JSON lines. All of it is
# read from stdin, because a command line holds 128 KiB.
_CALLS = f"""
import json, os, sys
{WRITER}
def run(code, calls, known, mark):
    out = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    module = sys.modules["solution"] = type(sys)("solution")
    try:
        exec(compile(code, "solution.py", "exec"), module.__dict__)
    except SystemExit:
        pass
    for name, (source, attribute) in known.items():
        if name not in module.__dict__:
            found = __import__(source)
            module.__dict__[name] = getattr(found, attribute) if attribute else found
    for number, text in enumerate(calls):
        try:
            line = mark + json.dumps([number, written(eval(text, module.__dict__))]) + "\\n"
        except BaseException:
            continue
        left = line.encode()
        while left:
            left = left[os.write(out, left):]
run(*json.load(sys.stdin))
"""


class Case(NamedTuple):
    """One test: an expression and its value, or what a program reads and what it has to write."""

    call: str | None
    value: Any
    stdin: str = ""
    tolerance: float | None = None  # of numbers, absolute or relative; None: that of the reward
    as_json: bool = False  # whether the value is of a format without tuples, so that a list may stand for one


def case_of(given: Any) -> Case:
    """A test from a row of the data set.

    given: {"stdin": text, "stdout": text}; {"call": expression, "value": value}, either with a "tolerance", for values
    1e-9 by default; or the text of an assertion that an expression equals a value, `assert f(1) == 2`, where the value
    is written with literals and Python's own constructors, such as `Counter(a=1)` or `math.inf`, or is `pytest.approx`
    of one; or of `assert math.isclose(f(1), 0.5)`. InputError for anything else.

    >>> case_of("assert add(1, 2) == 3")[:2]
    ('add(1, 2)', 3)
    """
    if isinstance(given, Mapping) and ("stdout" in given or {"call", "value"} <= given.keys()):
        tolerance = given.get("tolerance")
        if tolerance is None or (isinstance(tolerance, int | float) and 0 <= tolerance < math.inf):
            if "stdout" in given:
                return Case(None, str(given["stdout"]), str(given.get("stdin") or ""), tolerance)
            digits = 1e-9 if tolerance is None else tolerance
            return Case(str(given["call"]), given["value"], "", digits, True)
    if isinstance(given, str):
        try:
            (line,) = ast.parse(given.strip()).body
            if isinstance(line, ast.Assert):
                return _asserted(line.test)
        except (SyntaxError, ValueError):
            pass
    raise InputError(
        f"a test is {shown(given)}, but must be {{'stdin', 'stdout'}}, {{'call', 'value'}} or 'assert CALL == LITERAL'"
    )


def _asserted(test: ast.expr) -> Case:
    """The test of an assertion. ValueError for others than equality with a value."""
    match test:
        case ast.Compare(left=left, ops=[ast.Is()], comparators=[ast.Constant(value=None)]):
            return Case(ast.unparse(left), None)
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            for call, value in ((left, right), (right, left)):
                name, arguments, tolerance = _function_of(value)
                if name == "approx" and arguments:
                    return Case(ast.unparse(call), _literal(arguments[0]), "", tolerance or 1e-6)
                if isinstance(call, ast.Constant):
                    continue  # the value is on the left
                try:
                    return Case(ast.unparse(call), _literal(value))
                except ValueError:
                    continue
    name, arguments, tolerance = _function_of(test)
    if name == "isclose" and len(arguments) == 2:
        return Case(ast.unparse(arguments[0]), _literal(arguments[1]), "", tolerance or 1e-9)
    raise ValueError


def _function_of(node: ast.expr) -> tuple[str, list[ast.expr], float]:
    """The name and the arguments of a call, and the largest of its tolerances."""
    if not isinstance(node, ast.Call):
        return "", [], 0.0
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    tolerances = [
        float(_literal(one.value)) for one in node.keywords if one.arg in ("rel", "abs", "rel_tol", "abs_tol")
    ]
    return name, node.args, max(tolerances, default=0.0)


def _literal(node: ast.expr) -> Any:
    try:
        return built(node)
    except (TypeError, ArithmeticError, RecursionError) as error:  # such as the hash of a list
        raise ValueError from error


def passed(code: str, tests: Sequence[Case], limits: Limits | None = None, tolerance: float = 0.0) -> list[float]:
    """1 for each test that the program passes, 0 for the others. All calls are made in one run of the program.

    tolerance: of numbers, where a test has none of its own. What exceeds a limit has failed its test.
    """
    out, limits = [0.0] * len(tests), LIMITS if limits is None else limits
    calls = {place: test for place, test in enumerate(tests) if test.call is not None}
    over = 0
    if calls:
        found, stopped = _values(code, [str(test.call) for test in calls.values()], limits)
        over += stopped
        for (place, test), text in zip(calls.items(), found, strict=True):
            out[place] = float(text is not None and _equal(text, test, tolerance))
    for place, test in enumerate(tests):
        if test.call is None and over < OVER:
            result = run_code(code, test.stdin, limits=limits)
            over += result.stopped is not None
            out[place] = float(result.status == 0 and _same_lines(result.stdout, test, tolerance))
    return out


def _values(code: str, calls: list[str], limits: Limits) -> tuple[list[str | None], bool]:
    """What the calls evaluate to, as `WRITER` writes it, None where one fails or is not reached; and a stopped run."""
    own = secrets.token_hex(8)
    trees = filter(None, (syntax_tree(call.strip(), "eval") for call in calls))
    names = {node.id for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)}
    known = {name: KNOWN[name] for name in sorted(names & KNOWN.keys())}
    limits = replace(limits, output=max(limits.output, VALUES))
    found = run_code(_CALLS, json.dumps([code, calls, known, own]), limits=limits)
    out: list[str | None] = [None] * len(calls)
    for line in found.stdout.splitlines():
        if line.startswith(own):
            try:
                place, value = json.loads(line[len(own) :])
                out[place] = value
            except (ValueError, TypeError, IndexError):
                continue
    return out, found.stopped is not None


def _equal(text: str, test: Case, tolerance: float) -> bool:
    """Whether a value, as it was written in the sandbox, is the one that a test wants."""
    try:
        found = literal_value(text)
        return equal(found, test.value, tolerance if test.tolerance is None else test.tolerance, test.as_json)
    except (ValueError, TypeError, ArithmeticError, RecursionError):
        return False


def _same_lines(text: str, test: Case, tolerance: float) -> bool:
    """Whether a program wrote what a test wants, but for white space at the ends of lines; numbers to a tolerance."""
    found, wanted = ([line.rstrip() for line in one.rstrip().splitlines()] for one in (text, str(test.value)))
    tolerance = tolerance if test.tolerance is None else test.tolerance
    if found == wanted or not tolerance:
        return found == wanted
    words = [[line.split() for line in lines] for lines in (found, wanted)]
    return [list(map(len, words[0]))] == [list(map(len, words[1]))] and all(
        _same_word(one, other, tolerance)
        for lines in zip(*words, strict=True)
        for one, other in zip(*lines, strict=True)
    )


def _same_word(found: str, wanted: str, tolerance: float) -> bool:
    try:
        return found == wanted or equal(float(found), float(wanted), tolerance)
    except ValueError:
        return False


def code_tests(column: str = "tests", tolerance: float = 0.0) -> Callable[..., Any]:
    """A reward: the share of tests that the completion's program passes, with their results as the entry "tests".

    column: of the data set, a list of tests for each prompt; see `case_of`. Programs run in the sandbox, two at once.
    tolerance: of numbers, absolute or relative, where a test has none of its own; 0 is Python's equality. As text:
    `code_tests(COLUMN, TOLERANCE)`.

    Raises InputError for a name that is no column's, and where too few layers of the sandbox hold.
    """
    column, _, more = column.partition(",")
    column, given = column.strip() or "tests", column
    try:
        tolerance = float(more) if more.strip() else tolerance
    except ValueError:
        tolerance = math.nan
    if not column.isidentifier():
        raise InputError(f"code_tests({given}) names no column: give the name of a column of the data set")
    if not 0 <= tolerance < math.inf:
        raise InputError(f"code_tests({given},{more}): the tolerance must be a number, at least 0")
    require_guards(available())

    def code_tests(completions: Sequence[Any], **columns: Any) -> dict[str, list[Any]]:
        tests = [[case_of(one) for one in row] for row in columns[column]]
        codes = [
            code_in(text_of(one), [test.call for test in row if test.call], any(test.call is None for test in row))
            for one, row in zip(completions, tests, strict=True)
        ]
        with ThreadPoolExecutor(WORKERS) as pool:
            results = list(pool.map(lambda code, row: passed(code, row, tolerance=tolerance), codes, tests))
        return {REWARD: [sum(one) / max(len(one), 1) for one in results], "tests": results}

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    code_tests.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [inspect.Parameter("completions", kind), inspect.Parameter(column, kind)]
    )
    code_tests.provides = frozenset({"tests"})  # type: ignore[attr-defined]
    code_tests.own_limits = True  # type: ignore[attr-defined]  # those of the sandbox; see `limits`
    return code_tests
