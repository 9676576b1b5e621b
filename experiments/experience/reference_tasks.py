"""A task for references that move: most texts that score are not the best, and the policy must not settle on them."""

from __future__ import annotations

import string

import numpy as np

from experiments.experience.measure import Row, Task
from experiments.experience.tasks import DIGITS, SYMBOLS, guesses

LETTERS = DIGITS + string.ascii_uppercase  # of answers


def best_or_trap(text: str, row: Row) -> float:
    """1 for the answer, a half for one of the traps."""
    return 1.0 if text == row["answer"] else 0.5 if text in tuple(row["traps"]) else 0.0


def traps(prompts: int = 8, count: int = 18, steps: int = 120, rate: float = 5e-3) -> Task:
    """Of 36 letters one is worth 1, and `count` are worth a half. The policy guesses among all of them at first."""
    random = np.random.default_rng(14)
    rows: list[Row] = []
    for prompt in SYMBOLS[:prompts]:
        best, *others = random.permutation(list(LETTERS))
        rows.append({"prompt": prompt, "answer": str(best), "traps": "".join(others[:count])})
    names = [row["prompt"] for row in rows]
    group = 8
    return Task(
        rows, SYMBOLS + LETTERS, best_or_trap, "best_or_trap", length=1, tokens=steps * prompts * group,
        prompts_per_step=prompts, group_size=group, rate=rate, examples=guesses(names, 1, LETTERS), taught_steps=100,
    )  # fmt: skip
