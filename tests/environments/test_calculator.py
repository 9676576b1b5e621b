"""The calculator: exact values, and what it refuses."""

from __future__ import annotations

import doctest
import math
import random
import re
import sys
from fractions import Fraction
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "rollouts"))

from speaking import TEMPLATES, run_agents, tokenizer_of

from jaxrl_llm.environments.tools import calculator as module
from jaxrl_llm.environments.tools.base import schema_of, with_tools
from jaxrl_llm.environments.tools.calculator import FUNCTIONS, calculator, text_of, value_of
from jaxrl_llm.rollouts.agents.program import agent

END = TEMPLATES["hermes"][1]


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("1/3 + 1/6", "1/2 = 0.5"),
        ("0.1 + 0.2", "3/10 = 0.3"),
        ("(3 + 4) * 2 ** 10 / 7", "1024"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("3 \u00d7 4 \u00f7 5", "12/5 = 2.4"),
        ("2^-2", "1/4 = 0.25"),
        ("sqrt(16/9)", "4/3 = 1.3333333333333333"),
        ("2 ** 0.5", "1.4142135623730951"),
        ("round(2.675, 2)", "67/25 = 2.68"),
        ("round(-0.5)", "-1"),
        ("max(1, 5/2, min(9, 3))", "3"),
        ("gcd(12, 18) + lcm(4, 6) + abs(-1)", "19"),
        ("factorial(60)", "83209871127413901442763411832233643807541726063612... (82 digits)"),
        ("-(10 ** 60)", "-10000000000000000000000000000000000000000000000000... (61 digits)"),
        ("10 ** 60 / 7", "about 1.4285714285714285e+59"),
        ("1e-400", "0.0"),
        ("log(exp(1)) + sin(0) + floor(pi) + ceil(e)", "7.0"),
    ],
)
def test_values(expression: str, shown: str) -> None:
    assert calculator(expression) == shown


def test_random_expressions_are_those_of_fractions() -> None:
    """Against Python's own evaluation, with fractions in place of numbers."""
    draw = random.Random(0)

    def grown(depth: int) -> str:
        if depth == 0:
            return str(draw.randrange(1, 20))
        return f"({grown(depth - 1)} {draw.choice(['+', '-', '*', '/', '//', '%'])} {grown(depth - 1)})"

    for _ in range(200):
        text = grown(4)
        exact = "".join(f"Fraction({part})" if part.isdigit() else part for part in _parts(text))
        try:
            wanted = eval(exact, {"Fraction": Fraction})
        except ZeroDivisionError:
            with pytest.raises(RuntimeError, match="division by zero"):
                value_of(text)
        else:
            assert value_of(text) == wanted, text


def _parts(text: str) -> list[str]:
    return re.findall(r"\d+|\D+", text)


@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("", "is empty"),
        ("import os", "no arithmetic expression: import os"),
        ("2 +", "no arithmetic expression"),
        ("(" * 900, "no arithmetic expression"),
        ("1" * 1001, "1,001 characters, but at most 1,000"),
        ("\0", "no arithmetic expression"),
        ("__import__('os')", "there is no function __import__, but abs, min"),
        ("x + 1", "there is no name x"),
        ("(1).real", r"no arithmetic: \(1\)\.real"),
        ("'a' * 3", "no arithmetic: 'a'"),
        ("True + 1", "no arithmetic: True"),
        ("[1][0]", "no arithmetic"),
        ("1 if 2 else 3", "no arithmetic"),
        ("abs(x=1)", "no arithmetic"),
        ("1 / (2 - 2)", "division by zero"),
        ("0 ** -1", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("(2 ** 9000) * (2 ** 9000)", "too large"),
        ("(1/3) ** (10 ** 9)", "too large"),
        ("factorial(10 ** 9)", "too large"),
        ("1e400", "too large"),
        ("exp(1000)", "too large"),
        ("round(1/3, 10 ** 9)", "too large"),
        ("sqrt(-1)", "not defined: math domain error"),
        ("(-8) ** (1/3)", "a root of a negative number, -8"),
        ("gcd(1/2, 3)", "gcd of 1/2 = 0.5, which is not a whole number"),
        ("sqrt()", "sqrt does not take 0 numbers"),
    ],
)
def test_what_it_refuses(expression: str, told: str) -> None:
    with pytest.raises(RuntimeError, match=told):
        calculator(expression)


def test_it_describes_every_function() -> None:
    schema = schema_of(calculator)["function"]
    described = schema["parameters"]["properties"]["expression"]["description"]
    assert all(name in described for name in FUNCTIONS)
    assert value_of("pi") == math.pi
    assert text_of(Fraction(10**400, 3)).startswith("about 3333")
    assert doctest.testmod(module).failed == 0


def test_a_conversation() -> None:
    def says(text: str, sample: int) -> str:
        if "tool_response" in text:
            return f"It is {text.rpartition('<tool_response>')[2].split()[0]}.{END}"
        asked = "17 * 23" if sample == 0 else "1 / 0"
        return f'<tool_call>\n{{"name": "calculator", "arguments": {{"expression": "{asked}"}}}}\n</tool_call>{END}'

    tokenizer, rows = tokenizer_of("hermes"), [{"prompt": "What is 17 * 23?"}]
    found, _ = run_agents(agent(with_tools([calculator])), tokenizer, says, rows)
    right, wrong = found.groups[0].episodes
    assert tokenizer.decode(right.tokens).endswith(f"It is 391.{END}")
    assert "\nError: division by zero\n" in tokenizer.decode(wrong.tokens)
    assert (right.info["failed_calls"], wrong.info["failed_calls"]) == (0.0, 1.0)
