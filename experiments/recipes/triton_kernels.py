"""Triton kernels, by rules: a kernel is defined, launched, and does the work itself.

The idea of AutoTriton (2507.05687): a reward of execution and a reward of rules, which keeps a policy from calling the
framework in place of a kernel. Neither paper nor card was at hand. Here: the rules alone, read from the syntax; the
package of Triton needs torch, so that nothing is run. A reward of execution on a GPU is one more function.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.recipes.recipe import Row, config_of, main
from jaxrl_llm.rewards.code import code_in
from jaxrl_llm.rewards.verifiers import text_of
from jaxrl_llm.training.config import TrainConfig

OPERATIONS = {
    "adds two vectors": ("add", 2), "multiplies two vectors": ("mul", 2), "applies ReLU to a vector": ("relu", 1),
    "sums each row of a matrix": ("sum", 1), "computes a softmax of each row": ("softmax", 1),
    "multiplies two matrices": ("matmul", 2), "normalises each row (layer norm)": ("layer_norm", 1),
}  # fmt: skip
INSTEAD = ("add", "mul", "relu", "sum", "softmax", "matmul", "mm", "bmm", "layer_norm", "einsum", "where", "maximum")


def rows(seed: int, count: int) -> list[Row]:
    """Operations on vectors and matrices, in sizes that vary."""
    chosen, out = random.Random(seed), []
    for number in range(count):
        what, (name, inputs) = list(OPERATIONS.items())[number % len(OPERATIONS)]
        size = chosen.choice((128, 256, 1024, 4096))
        arguments = ", ".join("xy"[:inputs])
        prompt = (
            f"Write a Triton kernel that {what}, and a function {name}({arguments}) that launches it. "
            f"The block size is {size}. Answer with a block of code."
        )
        out.append({"prompt": prompt, "name": name, "block": str(size)})
    return out


def rules_of(code: str, name: str) -> dict[str, bool]:
    """Which rules a program keeps: a kernel (decorated by triton.jit), which the named function launches, loads and
    stores of its own, and no call of torch that does the operation.

    A program that does not parse keeps none.
    """
    try:
        tree = ast.parse(code)
    except (SyntaxError, ValueError, RecursionError):
        return dict.fromkeys(("kernel", "launched", "stores", "own"), False)
    functions = {one.name: one for one in ast.walk(tree) if isinstance(one, ast.FunctionDef)}
    kernels = {
        found: one for found, one in functions.items()
        if any(ast.unparse(mark).split("(")[0] in ("triton.jit", "jit") for mark in one.decorator_list)
    }  # fmt: skip
    wrapper = functions.get(name)
    launches = [] if wrapper is None else [one for one in ast.walk(wrapper) if isinstance(one, ast.Call)]
    launched = {ast.unparse(one.func.value) for one in launches if isinstance(one.func, ast.Subscript)} & {*kernels}
    inside = [
        ast.unparse(one.func) for kernel in kernels.values() for one in ast.walk(kernel) if isinstance(one, ast.Call)
    ]
    calls = {ast.unparse(one.func) for one in ast.walk(tree) if isinstance(one, ast.Call)}
    instead = {f"{module}.{what}" for module in ("torch", "F", "torch.nn.functional") for what in INSTEAD}
    return {
        "kernel": bool(kernels), "launched": bool(launched),
        "stores": any(one.endswith(".load") for one in inside) and any(one.endswith(".store") for one in inside),
        "own": bool(kernels) and not calls & instead,
    }  # fmt: skip


def rules(completions: Sequence[Any], name: Sequence[str], **_: Any) -> list[float]:
    """The share of the rules of `rules_of` that a program keeps."""
    out = []
    for text, called in zip(completions, name, strict=True):
        found = rules_of(code_in(text_of(text)), called)
        out.append(sum(found.values()) / len(found))
    return out


def config(folder: Path, model: str, rows: list[Row], **settings: Any) -> TrainConfig:
    """The run."""
    return config_of(folder, model, rows, [f"{Path(__file__).resolve()}:rules"], **settings)


if __name__ == "__main__":
    main(__doc__, rows, config)
