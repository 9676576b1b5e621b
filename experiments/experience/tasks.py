"""The tasks, one for each family of methods: what is hard about each, and what the right answers are."""

from __future__ import annotations

import string

import numpy as np

from experiments.experience.measure import Row, Task
from experiments.experience.tiny import Examples

DIGITS = "0123456789"  # of answers
SYMBOLS = "@#$%&*+=<>|~^?!;"  # of prompts; in none of the texts that methods add to them, whose letters vanish
NAMES = string.ascii_uppercase
HIDDEN = "-"  # stands for a digit of a hint that is not shown
NEVER, ALWAYS = "", "any"


def exact(text: str, row: Row) -> float:
    """1 for the answer."""
    return float(text == row["answer"])


def begins(text: str, row: Row) -> float:
    """1 for a text that begins with one of the answer's digits; ALWAYS stands for any text."""
    return float(row["answer"] == ALWAYS or text[:1] in tuple(row["answer"]))


def random_digits(random: np.random.Generator, length: int, digits: str = DIGITS) -> str:
    """Digits, all equally likely."""
    return "".join(random.choice(list(digits), length))


def guesses(prompts: list[str], length: int, digits: str = DIGITS) -> Examples:
    """Examples that teach to answer with random digits."""

    def make(random: np.random.Generator, count: int) -> list[tuple[str, str]]:
        return [(str(random.choice(prompts)), random_digits(random, length, digits)) for _ in range(count)]

    return make


def long_tail(useful: int = 24, solved: int = 100, impossible: int = 132) -> Task:
    """Few prompts can be learnt from: others are right whatever the answer, or never. Only the few are measured."""
    random = np.random.default_rng(1)
    pairs = [a + b for a in SYMBOLS for b in SYMBOLS]
    prompts = [*NAMES[:useful], *(pairs[i] for i in random.permutation(len(pairs))[: solved + impossible])]
    answers = [random_digits(random, 1) for _ in range(useful)] + [ALWAYS] * solved + [NEVER] * impossible
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True)]
    return Task(
        rows, NAMES + SYMBOLS + DIGITS, begins, "begins", range(useful), length=1, tokens=12_800, prompts_per_step=16,
        rate=1e-3, examples=guesses(prompts, 1), taught_steps=100,
    )  # fmt: skip


def masked(key: str, shown: int) -> str:
    """A hint: the first digits of a key, and HIDDEN for each of the others; none where nothing is shown."""
    return key[:shown] + HIDDEN * (len(key) - shown) if shown else ""


def copies_of_hints(prompts: list[str], length: int, digits: str) -> Examples:
    """Examples that teach to begin with the digits of a hint, and to go on at random."""

    def make(random: np.random.Generator, count: int) -> list[tuple[str, str]]:
        keys = [random_digits(random, length, digits) for _ in range(count)]
        return [(str(random.choice(prompts)) + masked(key, int(random.integers(0, length))), key) for key in keys]

    return make


def sparse_lock(keys: int = 8, length: int = 4, digits: str = DIGITS) -> Task:
    """Each prompt has a key of several digits, of which nothing less is rewarded. The policy can copy from a hint.

    Columns: hints from one digit to all but one, the strongest of them, a solution that states it and then the key, and
    the key as a response.
    """
    random = np.random.default_rng(2)
    rows: list[Row] = []
    for prompt in SYMBOLS[:keys]:
        key = random_digits(random, length, digits)
        hints = [masked(key, shown) for shown in range(1, length)]
        rows.append(
            {"prompt": prompt, "answer": key, "solution": hints[-1] + key, "hint": hints[-1], "hints": hints,
             "response": key, "trace": key}
        )  # fmt: skip
    return Task(
        rows, SYMBOLS + digits + HIDDEN, exact, "exact", length=length, tokens=40_000, rate=1e-3,
        prompts_per_step=8, group_size=16, examples=copies_of_hints(list(SYMBOLS), length, digits), taught_steps=400,
    )  # fmt: skip
