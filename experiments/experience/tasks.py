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


def sparse_lock(keys: int = 4, length: int = 4, digits: str = DIGITS) -> Task:
    """Each prompt has a key of several digits, of which nothing less is rewarded. The policy can copy from a hint.

    Columns: hints from one digit to all but one, one of half the digits, a solution that states it and then the key,
    and the key as a response.
    """
    random = np.random.default_rng(2)
    rows: list[Row] = []
    for prompt in SYMBOLS[:keys]:
        key = random_digits(random, length, digits)
        hints, half = [masked(key, shown) for shown in range(1, length)], masked(key, length // 2)
        rows.append(
            {"prompt": prompt, "answer": key, "solution": half + key, "hint": half, "hints": hints,
             "response": key, "trace": key}
        )  # fmt: skip
    return Task(
        rows, SYMBOLS + digits + HIDDEN, exact, "exact", length=length, tokens=30_720, rate=2e-3,
        prompts_per_step=4, group_size=16, examples=copies_of_hints(list(SYMBOLS), length, digits), taught_steps=300,
    )  # fmt: skip


def rare(prompts: int = 12, length: int = 2) -> Task:
    """Answers of two digits, right once in a hundred at first, so that most groups of a prompt have no success."""
    random = np.random.default_rng(4)
    names = list(NAMES[:prompts])
    rows = [{"prompt": name, "answer": random_digits(random, length)} for name in names]
    return Task(
        rows, NAMES + DIGITS, exact, "exact", length=length, tokens=7_680, prompts_per_step=12, group_size=8,
        rate=1e-3, examples=guesses(names, length), taught_steps=100,
    )  # fmt: skip


def right_digits(text: str, row: Row) -> float:
    """The share of the answer's digits that are right."""
    return sum(a == b for a, b in zip(text, row["answer"], strict=False)) / len(row["answer"])


def many_digits(prompts: int = 4, length: int = 8, digits: str = "01234") -> Task:
    """Long answers, of which each right digit counts: a sample's score says little of any one of its digits."""
    random = np.random.default_rng(5)
    names = list(NAMES[:prompts])
    rows = [{"prompt": name, "answer": random_digits(random, length, digits)} for name in names]
    return Task(
        rows, NAMES + DIGITS, right_digits, "right_digits", length=length, tokens=15_360, prompts_per_step=4,
        group_size=16, rate=2e-3, examples=guesses(names, length, digits), taught_steps=100,
    )  # fmt: skip


def all_tests(prompts: int = 4, length: int = 4) -> Task:
    """Only a whole answer is right, and a verifier also says which of its digits pass: as tests do of a program."""
    random = np.random.default_rng(6)
    names = list(NAMES[:prompts])
    rows = [{"prompt": name, "answer": random_digits(random, length)} for name in names]
    return Task(
        rows, NAMES + DIGITS, exact, "tested", length=length, tokens=10_240, prompts_per_step=4, group_size=16,
        rate=2e-3, examples=guesses(names, length), taught_steps=100,
    )  # fmt: skip
