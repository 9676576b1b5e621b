"""Extract a function, without a change of what the code does.

The idea of reinforcement learning for refactoring (PPO on "extract method" with a sequence-to-sequence model): the
reward is of code that compiles, in which the refactoring is found. Neither paper nor card was at hand: the rules are
ours, and the policy is a causal model. Here: Python functions with a repeated expression; the reward looks for a new
function that the old one calls, for fewer repetitions, and for equal values in the sandbox.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.recipes.recipe import Row, config_of, main
from jaxrl_llm.rewards.code import code_in, code_tests
from jaxrl_llm.rewards.verifiers import text_of
from jaxrl_llm.training.config import TrainConfig

EXPRESSIONS = ("{x} * {x} + {k}", "({x} + {k}) % 7", "abs({x} - {k}) * 2", "max({x}, {k}) - min({x}, {k})")


def rows(seed: int, count: int) -> list[Row]:
    """Functions of three numbers, each of which goes through the same expression."""
    chosen, out = random.Random(seed), []
    for number in range(count):
        form, k = EXPRESSIONS[number % len(EXPRESSIONS)], chosen.randint(1, 9)
        parts = [form.format(x=x, k=k) for x in "abc"]
        source = "def total(a, b, c):\n" + "".join(f"    {x}1 = {p}\n" for x, p in zip("abc", parts, strict=True))
        source += "    return a1 + b1 + c1\n"
        space: dict[str, Any] = {}
        exec(source, space)  # of our own making
        cases = [[chosen.randint(-9, 9) for _ in range(3)] for _ in range(4)]
        tests = [{"call": f"total{tuple(case)}", "value": space["total"](*case)} for case in cases]
        prompt = (
            "Extract the repeated computation of this function into a function of its own, and call that. "
            f"Keep the name total.\n```python\n{source}```\nAnswer with a block of code."
        )
        out.append({"prompt": prompt, "source": source, "tests": tests})
    return out


def functions_in(code: str) -> dict[str, ast.FunctionDef]:
    """The functions of a module by name; none of code that does not parse."""
    try:
        found = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError):
        return {}
    return {one.name: one for one in found if isinstance(one, ast.FunctionDef)}


def is_extracted(code: str, source: str) -> bool:
    """Whether there is a new function that `total` calls more than once, and `total` computes less itself."""
    functions, before = functions_in(code), functions_in(source)["total"]
    after = functions.pop("total", None)
    if after is None or not functions:
        return False
    calls = [one.func.id for one in ast.walk(after) if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)]
    operations = [sum(isinstance(one, ast.BinOp) for one in ast.walk(tree)) for tree in (before, after)]
    return any(calls.count(name) > 1 for name in functions) and operations[1] < operations[0]


def refactored(completions: Sequence[Any], source: Sequence[str], tests: Sequence[Any], **_: Any) -> list[float]:
    """0 without code that parses; 0.2 for code that does, 0.3 more for the share of tests that pass, and 0.5 more where
    all pass and a function was extracted."""
    shares, out = code_tests()(completions, tests=tests)["reward"], []
    for text, before, share in zip(completions, source, shares, strict=True):
        code = code_in(text_of(text))
        whole = share == 1 and is_extracted(code, before)
        out.append(0.2 + 0.3 * share + 0.5 * whole if functions_in(code) else 0.0)
    return out


def config(folder: Path, model: str, rows: list[Row], **settings: Any) -> TrainConfig:
    """The run, by PPO with a critic, which sees two steps before the policy learns."""
    return config_of(
        folder, model, rows, [f"{Path(__file__).resolve()}:refactored"],
        **{"algorithm": "ppo", "critic_steps": 2, "group_size": 4, **settings},
    )  # fmt: skip


if __name__ == "__main__":
    main(__doc__, rows, config)
