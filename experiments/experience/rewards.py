"""Reward functions of the runs."""

from __future__ import annotations

from typing import Any


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the answer, and nothing else."""
    return [float(text == one) for text, one in zip(completions, answer, strict=True)]


def begins(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for a text that begins with one of the answer's letters; "any" stands for any text."""
    return [float(one == "any" or text[:1] in tuple(one)) for text, one in zip(completions, answer, strict=True)]


def matches(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for a text as long as the answer with the same digits, but any at the answer's dots."""
    return [float(len(text) == len(one) and all(b in (a, ".") for a, b in zip(text, one, strict=True)))
            for text, one in zip(completions, answer, strict=True)]  # fmt: skip


def right_digits(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """The share of the answer's digits that are right."""
    pairs = zip(completions, answer, strict=True)
    return [sum(a == b for a, b in zip(text, one, strict=False)) / len(one) for text, one in pairs]


def tested(completions: list[str], answer: list[str], **_: Any) -> dict[str, list[Any]]:
    """1 for the answer, and nothing else; and as the entry "tests", which of its digits are right."""
    tests = [
        [float(text[place : place + 1] == digit) for place, digit in enumerate(one)]
        for text, one in zip(completions, answer, strict=True)
    ]
    return {"reward": exact(completions, answer), "tests": tests}


tested.provides = {"tests"}  # type: ignore[attr-defined]


def best_or_decoy(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for a text that begins with the first digit of the answer, a half for one that begins with the second."""
    return [{one[0]: 1.0, one[1]: 0.5}.get(text[:1], 0.0) for text, one in zip(completions, answer, strict=True)]


def best_or_trap(completions: list[str], answer: list[str], traps: list[str], **_: Any) -> list[float]:
    """1 for the answer, a half for one of the traps."""
    return [1.0 if text == one else 0.5 if text in tuple(some) else 0.0
            for text, one, some in zip(completions, answer, traps, strict=True)]  # fmt: skip
