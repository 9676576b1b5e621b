"""Tasks for hints, given prefixes and replay: locks that guesses do not open, and two sets of prompts, one by one."""

from __future__ import annotations

import numpy as np

from experiments.experience.measure import Row, Task
from experiments.experience.tasks import DIGITS, NAMES, SYMBOLS, begins, exact, guesses, random_digits
from experiments.experience.tiny import END, Examples
from jaxrl_llm.rollouts.curricula import choose_prompts
from jaxrl_llm.rollouts.curricula_stages import staged

LETTERS = DIGITS + "BC"  # of keys; in none of the texts with which methods write a hint


def guesses_and_copies(prompts: list[str], length: int, letters: str) -> Examples:
    """Examples that teach to guess a key and to end, and to copy the letters of a hint, before or after the prompt."""

    def make(random: np.random.Generator, count: int) -> list[tuple[str, str]]:
        pairs = []
        for _ in range(count):
            key, prompt, shown = random_digits(random, length, letters), str(random.choice(prompts)), random.random()
            with_hint = prompt if shown < 0.5 else prompt + key if shown < 0.75 else key + prompt
            pairs.append((with_hint, key + END))
        return pairs

    return make


def lock(keys: int = 4, length: int = 3, letters: str = LETTERS, tokens: int = 6_144, rate: float = 3e-3) -> Task:
    """Each prompt has a key of a few letters, of which nothing less is rewarded. The policy guesses, and copies hints.

    The key is in the columns of traces, responses, solutions, hints, examples and teachers' answers.
    """
    random = np.random.default_rng(7)
    rows: list[Row] = []
    for prompt in SYMBOLS[:keys]:
        key = random_digits(random, length, letters)
        rows.append(
            {"prompt": prompt, "answer": key, "response": key, "trace": key, "solution": key, "teachers": [key],
             "hint": key, "hints": [key], "examples": key}
        )  # fmt: skip
    return Task(
        rows, SYMBOLS + letters, exact, "exact", length=length + 1, tokens=tokens, rate=rate, prompts_per_step=keys,
        group_size=16, examples=guesses_and_copies(list(SYMBOLS[:keys]), length, letters), taught_steps=150,
    )  # fmt: skip


def one_after_the_other(names: int = 4, first: int = 14, steps: int = 56, rate: float = 5e-3) -> Task:
    """Two sets of prompts, of which the second overwrites what a small policy has learnt of the first.

    The `first` steps have the prompts of the first set, each with an answer of its own out of 0 to 4; the others have
    those of the second, for which any of 5 to 9 is right. All are measured.
    """
    random = np.random.default_rng(8)
    answers = [str(one) for one in random.permutation(list(DIGITS[:5]))[:names]] + [DIGITS[5:]] * names
    rows: list[Row] = [
        {"prompt": name, "answer": answer, "set": str(1 + number // names)}
        for number, (name, answer) in enumerate(zip(NAMES[: 2 * names], answers, strict=True))
    ]
    prompts = [row["prompt"] for row in rows]
    group = 16
    return Task(
        rows, NAMES + DIGITS, begins, "begins", length=1, tokens=steps * names * group, prompts_per_step=names,
        group_size=group, rate=rate, examples=guesses(prompts, 1), taught_steps=100,
        curriculum=choose_prompts(staged("set", first)),
    )  # fmt: skip
