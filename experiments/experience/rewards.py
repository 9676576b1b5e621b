"""Reward functions of the runs."""

from __future__ import annotations

from typing import Any


def exact(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for the answer, and nothing else."""
    return [float(text == one) for text, one in zip(completions, answer, strict=True)]


def begins(completions: list[str], answer: list[str], **_: Any) -> list[float]:
    """1 for a text that begins with one of the answer's letters; "any" stands for any text."""
    return [float(one == "any" or text[:1] in tuple(one)) for text, one in zip(completions, answer, strict=True)]
