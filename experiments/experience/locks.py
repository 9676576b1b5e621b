"""Tasks for hints, given prefixes and replay: locks that guesses do not open, and two sets of prompts, one by one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from experiments.experience.measure import Row, Task
from experiments.experience.tasks import DIGITS, NAMES, SYMBOLS, begins, exact, guesses, random_digits
from experiments.experience.tiny import END, Examples
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.scores import staged

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


WHEELS = ("ABCDEFGHIJKLMNOPQRST", "abcdefghijklmnopqrst", "0123456789uvwxyzUVWX")  # letters of a key, place by place


def one_of_each(prompts: list[str], wheels: Sequence[str]) -> Examples:
    """Examples that teach to answer with a random letter of each of the wheels, in their order."""

    def make(random: np.random.Generator, count: int) -> list[tuple[str, str]]:
        return [(str(random.choice(prompts)), turned(random, wheels)) for _ in range(count)]

    return make


def turned(random: np.random.Generator, wheels: Sequence[str]) -> str:
    """A random letter of each of the wheels."""
    return "".join(str(random.choice(list(wheel))) for wheel in wheels)


def combination_lock(
    wheels: int = 3, prompts: int = 4, tokens: int = 9_216, rate: float = 1e-3, turns: int = 20
) -> Task:
    """One key for all prompts, a letter of each wheel, and nothing less than the whole is rewarded. It is stored."""
    letters = [wheel[:turns] for wheel in WHEELS[:wheels]]
    key = turned(np.random.default_rng(9), letters)
    rows: list[Row] = [{"prompt": name, "answer": key, "trace": key, "response": key} for name in SYMBOLS[:prompts]]
    return Task(
        rows, SYMBOLS + "".join(letters), exact, "exact", length=wheels, tokens=tokens, rate=rate,
        prompts_per_step=prompts, group_size=16, examples=one_of_each(list(SYMBOLS[:prompts]), letters),
        taught_steps=200,
    )  # fmt: skip
