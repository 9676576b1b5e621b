"""Rewards of code: tests of all kinds, and programs that try to pass without an answer."""

from __future__ import annotations

import pytest

from jaxrl_llm.errors import InputError
from jaxrl_llm.rewards.code import Case, case_of, code_in, code_tests, passed
from jaxrl_llm.rewards.loading import declared

ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", {"call": "add([1], [2])", "value": [1, 2]}, {"call": "add(0.1, 0.2)", "value": 0.3}]


def test_calls_are_compared_outside() -> None:
    tests = [case_of(one) for one in TESTS]
    assert passed(ADD, tests) == [1.0, 1.0, 1.0]
    assert passed("def add(a, b):\n    return 3", tests) == [1.0, 0.0, 0.0]
    assert passed("def add(a, b):\n    return a - b", tests) == [0.0, 0.0, 0.0], "one raises, the others go on"
    assert passed("def add(a, b):\n    return True", [Case("add(1, 2)", 1)]) == [0.0], "types count"


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "class E:\n    def __eq__(self, other): return True\ndef add(a, b): return E()",
        "import builtins\nbuiltins.repr = lambda x: '3 == 3'\ndef add(a, b): return 1",
        "import sys\ndef add(a, b):\n    return sys._getframe(1).f_locals.get('value', 0)",
        "while True: pass",
        "def add(a, b:",
    ],
    ids=["exit", "equal", "repr", "frames", "loop", "syntax"],
)
def test_no_trick_passes(code: str) -> None:
    from jaxrl_llm.environments.sandbox import Limits

    assert passed(code, [Case("add(1, 2)", 3)], Limits(seconds=2)) == [0.0]


def test_programs_read_and_write() -> None:
    tests = [case_of({"stdin": "2\n3\n", "stdout": "5"}), case_of({"stdin": "1\n1\n", "stdout": "3\n"})]
    assert passed("print(int(input()) + int(input()))", tests) == [1.0, 0.0]
    assert passed("print(5)\nraise SystemExit(1)", tests) == [0.0, 0.0], "what fails has not passed"


def test_code_is_the_last_block() -> None:
    assert code_in("```python\na\n```\nbetter\n```py\nb\n```") == "b\n"
    assert code_in("```\nopen to the end") == "open to the end"
    assert code_in("print(1)") == "print(1)"


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
