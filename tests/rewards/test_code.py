"""Rewards of code: tests of all kinds, and programs that try to pass without an answer."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from jaxrl_llm.environments.sandbox import Limits
from jaxrl_llm.rewards import close_rewards, get_reward, score
from jaxrl_llm.rewards.code import Case, case_of, code_in, code_tests, passed
from jaxrl_llm.rewards.workers.loading import declared
from jaxrl_llm.utils.errors import InputError

ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", {"call": "add([1], [2])", "value": [1, 2]}, {"call": "add(0.1, 0.2)", "value": 0.3}]


def test_calls_are_compared_outside() -> None:
    tests = [case_of(one) for one in TESTS]
    assert passed(ADD, tests) == [1.0, 1.0, 1.0]
    assert passed("def add(a, b):\n    return 3", tests) == [1.0, 0.0, 0.0]
    assert passed("def add(a, b):\n    return a - b", tests) == [0.0, 0.0, 0.0], "one raises, the others go on"


EQUAL = {
    "True": "1", "1": "True", "2.0": "2", "Fraction(1, 2)": "0.5", "Decimal('0.5')": "Fraction(1, 2)", "-0.0": "0",
    "Counter('aab')": "{'a': 2, 'b': 1}", "Counter(a=1, b=0)": "Counter({'a': 1})", "defaultdict(int, a=1)": "{'a': 1}",
    "Point(1, 2)": "(1, 2)", "[Point(1, 2)]": "[(1, 2)]", "frozenset({1})": "{1}", "{1: {2}}": "{1: frozenset([2])}",
    "{'a': 1}.keys()": "{'a'}", "Color.RED": "3", "Word('a')": "'a'", "math.inf": "float('inf')", "-math.inf": "-inf",
    "[math.nan]": "[float('nan')]", "1 + 2j": "(1+2j)", "deque([1])": "collections.deque([1])",
    "b'a'": "bytearray(b'a')", "range(3)": "range(0, 3, 1)",
    "10**5000": hex(10**5000),
    "'\\ud800\\n\u2028'": "'\\ud800\\n\u2028'", "None": "None", "date(2020, 1, 2)": "datetime.date(2020, 1, 2)",
}  # fmt: skip
DIFFERENT = {
    "[1, 2]": "(1, 2)", "'1'": "1", "{'a': 1}": "{'a': 2}", "0.1 + 0.2": "0.3", "Counter('a')": "{'a': 1, 'b': 0}",
    "range(3)": "[0, 1, 2]", "{1}": "[1]", "10**30": "10**30 + 1", "None": "False", "[1]": "[1, 1]", "1j": "1",
    "OrderedDict(a=1, b=2)": "OrderedDict(b=2, a=1)", "object()": "None", "math.nan": "0.0", "'a'": "b'a'",
}  # fmt: skip
CLASSES = """
import enum, math
from collections import *
from datetime import date
from decimal import Decimal
from fractions import Fraction
Point = namedtuple("Point", "x y")
class Color(enum.IntEnum):
    RED = 3
class Word(str):
    def __repr__(self): return "a word"
def same(x): return x
list = str = type = repr = print = isinstance = None  # names of the program's own
"""


def test_values_are_equal_as_python_says() -> None:
    def results(pairs: dict[str, str]) -> dict[str, float]:
        wanted = {call: str(eval(value)) if "**" in value else value for call, value in pairs.items()}
        tests = [case_of(f"assert same({call}) == {value}") for call, value in wanted.items()]
        return dict(zip(pairs, passed(CLASSES, tests), strict=True))

    assert results(EQUAL) == dict.fromkeys(EQUAL, 1.0)
    assert results(DIFFERENT) == dict.fromkeys(DIFFERENT, 0.0)


def test_floats_have_a_tolerance_where_it_is_asked_for() -> None:
    code = "def f(): return [0.1 + 0.2, 10**20]\ndef g(): return 0.3000001"
    exact = ["assert f()[0] == 0.3", "assert g() == 0.3"]
    asked = [
        "assert f()[0] == pytest.approx(0.3)",
        "assert math.isclose(f()[0], 0.3)",
        {"call": "f()[0]", "value": 0.3},
    ]
    asked += ["assert g() == approx(0.3, abs=1e-3)", {"call": "g()", "value": 0.3, "tolerance": 1e-3}]
    refused = [
        "assert f()[1] == approx(10**20 + 1)".replace("10**20 + 1", str(10**20 + 1)),
        {"call": "g()", "value": 0.3},
    ]
    tests = [case_of(one) for one in exact + asked + refused]
    assert passed(code, tests) == [0.0] * 2 + [1.0] * 5 + [0.0] * 2, "whole numbers have none"
    assert passed(code, tests[:2], tolerance=1e-6) == [1.0, 1.0]
    lines = [case_of({"stdout": "0.3 a\n2"}), case_of({"stdout": "0.3 a\n2", "tolerance": 1e-3})]
    assert passed("print(0.3000001, 'a')\nprint(2)", lines) == [0.0, 1.0]
    columns = {"completions": ["def g(): return 0.3000001"], "tests": [["assert g() == 0.3"]]}
    assert code_tests("tests, 1e-3")(**columns)["reward"] == [1.0]
    assert code_tests("tests")(**columns)["reward"] == [0.0]
    with pytest.raises(InputError, match="the tolerance must be a number"):
        code_tests("tests, much")


def test_what_a_program_does_beside_its_functions_does_not_matter() -> None:
    prints = "print('x' * 10**6)\nimport sys\nsys.stdout = None\n"
    ends = "if __name__ == '__main__':\n    print(input())\nraise SystemExit\n"
    calls = [case_of("assert add(1, 2) == 3"), case_of("assert 3 == add(1, 2)"), case_of("assert add(0, 0) is None")]
    assert passed("from __future__ import annotations\n" + prints + ADD + ends, calls) == [1.0, 1.0, 0.0]
    many = [case_of({"call": "[*range(add(20_000, 0))]", "value": list(range(20_000))})]
    assert passed(ADD, many) == [1.0]
    large = [case_of({"call": f"len(add({'1' * 200_000!r}, ''))", "value": 200_000})]
    assert passed(ADD, large) == [1.0], "more than a command line holds"
    assert passed(ADD, [case_of("assert Counter(add('a', 'ab')) == Counter({'a': 2, 'b': 1})")]) == [1.0]


def test_a_program_that_exceeds_its_limit_is_wrong_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jaxrl_llm.rewards.code.LIMITS", Limits(seconds=1.5))
    good, loop = "```python\nprint(int(input()) + 1)\n```", "```python\nwhile True: pass\n```"
    tests = [{"stdin": f"{i}\n", "stdout": f"{i + 1}"} for i in range(5)]
    rewards = [replace(get_reward("code_tests(tests)"), time_limit=0.1, default=-1.0)]
    reward = code_tests("tests")
    start = time.monotonic()
    assert reward(completions=[good, loop, good], tests=[tests] * 3)["reward"] == [1.0, 0.0, 1.0]
    assert time.monotonic() - start < 1.5 * 4.5, "after three the others are not tried"
    found = score(rewards, [good, good], {"tests": [tests] * 2})
    assert (found.components["code_tests"].tolist(), found.failures) == ([1.0, 1.0], {"code_tests": 0})
    close_rewards(rewards)


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "class E:\n    def __eq__(self, other): return True\ndef add(a, b): return E()",
        "import builtins\nbuiltins.repr = lambda x: '3 == 3'\ndef add(a, b): return 1",
        "class E(int):\n    def __eq__(self, other): return True\n    def __repr__(self): return '3'\n"
        "def add(a, b): return E(4)",
        "import json\njson.dumps = lambda x: '[0, \"3\"]' if x[1] == 'no' else 'x'\ndef add(a, b): return 'no'",
        "import sys\ndef add(a, b):\n    return sys._getframe(1).f_locals.get('value', 0)",
        "while True: pass",
        "def add(a, b:",
    ],
    ids=["exit", "equal", "repr", "number", "dumps", "frames", "loop", "syntax"],
)
def test_no_trick_passes(code: str) -> None:
    assert passed(code, [Case("add(1, 2)", 3)], Limits(seconds=2)) == [0.0]


def test_programs_read_and_write() -> None:
    tests = [case_of({"stdin": "2\n3\n", "stdout": "5"}), case_of({"stdin": "1\n1\n", "stdout": "3\n"})]
    assert passed("print(int(input()) + int(input()))", tests) == [1.0, 0.0]
    assert passed("print(5)\nraise SystemExit(1)", tests) == [0.0, 0.0], "what fails has not passed"


def test_code_is_the_longest_block_of_python() -> None:
    assert code_in("```python\na\n```\nbetter\n```py\nb\n```") == "b\n"
    assert code_in("```\nopen to the end") == "open to the end"
    assert code_in("print(1)") == "print(1)"
    assert code_in("```bash\npip install something long\n```\n```python\nx = 1\n```") == "x = 1\n"
    assert code_in("no code at all") == "no code at all"


F = "def f(x):\n    return x + 1\n"
G = "def f(x):\n    return x + 2  # wrong, and longer than the other one\n"


@pytest.mark.parametrize(
    "text",
    [
        f"```python\n{F}```\nExample:\n```python\nprint(f(1))\nprint(f(2))\nprint(f(3))\n```",
        f"```python\n{F}```\nOutput:\n```\n2\n```",
        f"```python3\n{F}```",
        f"```Python\n{F}```",
        f"```PY\n{F}```",
        f"``` python\n{F}```",
        f"```{{.python}}\n{F}```",
        f"```python title=f.py\n{F}```",
        f"~~~python\n{F}~~~",
        f"````python\n{F}````",
        f"```\n{F}```",
        f"```python\n{F.rstrip()}```",
        f"```python\n{F}",
        f"1. First:\n   ```python\n   {F.strip().replace(chr(10), chr(10) + '   ')}\n   ```",
        f"```python\n{G}```\nWait, no:\n```python\n{F}```",
        f"<think>```python\n{G}```</think>```python\n{F}```",
        f"```python\n{F}```\nRun it:\n```bash\npython f.py --with-a-long --command line\n```",
        f"```python\n{F}```\nAs in a session:\n```python\n>>> f(1)\n2\n>>> f(2)\n3\n>>> f(3)\n```",
        f"```python\n{F}```\nIn C:\n```c\nint f(int x) {{ return x + 1; }}  // the same in another language\n```",
        "```python\nfrom math import floor\none = 1\n```\nThen:\n```python\ndef f(x):\n    return floor(x) + one\n```",
        F,
        f"Here is the function.\n\n{F}\nIt adds one to x.",
        f"<answer>\n{F}</answer>",
        f"Indented:\n\n    {F.strip().replace(chr(10), chr(10) + '    ')}\n\nThat is all.",
        f'```python\n{F[:9]}\n    """Adds one.\n\n    ```\n    f(1)\n    ```\n    """\n{F[10:]}```',
    ],
)
def test_the_block_is_the_last_that_defines_what_is_called(text: str) -> None:
    tests = [case_of("assert f(1) == 2")]
    assert passed(code_in(text, [tests[0].call or ""]), tests) == [1.0]
    assert code_tests("tests")(completions=[text], tests=[["assert f(1) == 2"]])["reward"] == [1.0]


def test_a_program_that_reads_is_the_last_that_does() -> None:
    text = "```python\nn = int(input())\nprint(n + 1)\n```\nShorter:\n```python\nprint(int(input()) + 1)\n```\n"
    text += "Test:\n```python\nfor n in range(10):\n    print(n, n + 1)  # a long example of what it should print\n```"
    assert code_in(text, reads=True) == "print(int(input()) + 1)\n"
    assert code_tests("t")(completions=[text], t=[[{"stdin": "1", "stdout": "2"}]])["reward"] == [1.0]


def test_the_reward_and_its_entries() -> None:
    found = code_tests("tests")(completions=[f"```python\n{ADD}```", "no code"], tests=[TESTS, TESTS[:2]])
    assert found == {"reward": [1.0, 0.0], "tests": [[1.0, 1.0, 1.0], [0.0, 0.0]]}
    assert declared("code_tests(tests)") == {"tests"}


def test_what_is_no_test() -> None:
    for wrong in ("assert add(1)", "add(1) == 2", {"call": "x"}, 3, "assert add(1) == x"):
        with pytest.raises(InputError, match="a test is"):
            case_of(wrong)
    with pytest.raises(InputError, match="names no column"):
        code_tests("a b")
