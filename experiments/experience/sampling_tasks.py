"""Tasks of the methods that choose where samples go: to which prompts, from which fork, at which temperature."""

from __future__ import annotations

import string

import numpy as np

from experiments.experience.measure import Row, Task
from experiments.experience.tasks import DIGITS, NAMES, NEVER, SYMBOLS, begins, guesses, random_digits
from experiments.experience.tiny import Examples

FREE = "."  # a digit that does not matter


def narrowed(choices: dict[str, str]) -> Examples:
    """Examples that teach to answer each prompt with one of its digits, all equally likely."""
    prompts = list(choices)

    def make(random: np.random.Generator, count: int) -> list[tuple[str, str]]:
        drawn = [prompts[i] for i in random.integers(len(prompts), size=count)]
        return [(prompt, random_digits(random, 1, choices[prompt])) for prompt in drawn]

    return make


def mostly_impossible(useful: int = 8, impossible: int = 72, steps: int = 100, rate: float = 3e-4) -> Task:
    """Nine prompts in ten are never right, whatever the answer. For the others the policy guesses among four digits, of
    which one is right. A step has two prompts, so that most uniform steps have no gradient."""
    random = np.random.default_rng(11)
    letters = string.ascii_letters[:useful]
    pairs = [a + b for a in SYMBOLS for b in SYMBOLS]
    prompts = [*letters, *(pairs[i] for i in random.permutation(len(pairs))[:impossible])]
    choices = {prompt: "".join(random.permutation(list(DIGITS))[:4]) for prompt in letters}
    answers = [choices[prompt][0] for prompt in letters] + [NEVER] * impossible
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True)]
    return Task(
        rows, letters + SYMBOLS + DIGITS, begins, "begins", range(useful), length=1, tokens=16 * steps, rate=rate,
        prompts_per_step=2, group_size=8, examples=narrowed(choices), taught_steps=300,
    )  # fmt: skip


def matches(text: str, row: Row) -> float:
    """1 for a text as long as the answer that has its digits; any other will do at FREE places."""
    pairs = zip(text, row["answer"], strict=False)
    return float(len(text) == len(row["answer"]) and all(b in (a, FREE) for a, b in pairs))


def few_hard(easy: int = 28, hard: int = 4) -> Task:
    """Most prompts need no samples, as any two digits are right; a few are right once in a hundred answers at first."""
    random = np.random.default_rng(3)
    prompts = list((NAMES + SYMBOLS)[: easy + hard])
    answers = [random_digits(random, 2) for _ in range(hard)] + [FREE * 2] * easy
    rows = [{"prompt": prompt, "answer": answer} for prompt, answer in zip(prompts, answers, strict=True)]
    return Task(
        rows, NAMES + SYMBOLS + DIGITS, matches, "matches", range(hard), length=2, tokens=12_800, prompts_per_step=8,
        rate=1e-3, examples=guesses(prompts, 2), taught_steps=100,
    )  # fmt: skip


def late_key(prompts: int = 4, free: int = 16, key: int = 2, tokens: int = 13_824) -> Task:
    """Completions of which the first digits do not matter, and the last must be the key, the same for all prompts."""
    names, answer = list(NAMES[:prompts]), FREE * free + random_digits(np.random.default_rng(12), key)
    return Task(
        [{"prompt": name, "answer": answer} for name in names], NAMES + DIGITS, matches, "matches", length=free + key,
        tokens=tokens, prompts_per_step=4, group_size=16, rate=1e-3, examples=guesses(names, free + key),
        taught_steps=200,
    )  # fmt: skip


def best_or_decoy(text: str, row: Row) -> float:
    """1 for a text that begins with the first digit of the answer, a half for one that begins with the second."""
    return {row["answer"][0]: 1.0, row["answer"][1]: 0.5}.get(text[:1], 0.0)


def decoys(prompts: int = 8, tokens: int = 10_240, share: float = 0.85) -> Task:
    """Each prompt has a digit that the policy often draws, and is worth a half, and one that is worth 1 and rare."""
    random = np.random.default_rng(13)
    names = list(NAMES[:prompts])
    pairs = {name: "".join(random.permutation(list(DIGITS))[:2]) for name in names}

    def make(random: np.random.Generator, count: int) -> list[tuple[str, str]]:
        drawn = [names[i] for i in random.integers(prompts, size=count)]
        return [(name, pairs[name][1] if random.random() < share else random_digits(random, 1)) for name in drawn]

    return Task(
        [{"prompt": name, "answer": pairs[name]} for name in names], NAMES + DIGITS, best_or_decoy, "best_or_decoy",
        length=1, tokens=tokens, prompts_per_step=8, group_size=8, rate=2e-3, examples=make, taught_steps=200,
    )  # fmt: skip
