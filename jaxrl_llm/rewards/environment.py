"""The reward `environment`: what the environment of an episode gave for it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

ENVIRONMENT = "environment"


def environment(completions: list[Any]) -> list[float]:
    """Episodes have this reward from their environment, so that it is never computed from completions.

    Raises ValueError: the completions are of no environment.
    """
    raise ValueError("these completions were sampled without an environment: give one, --environment MODULE:NAME")


def is_among(rewards: Iterable[str]) -> bool:
    """Whether one of the reward specs NAME[*WEIGHT] is `environment`; a function of that name in a file is not.

    >>> is_among(["number_match", "environment*0.5"]), is_among(["my.py:environment"])
    (True, False)
    """
    return any(text.partition("*")[0].strip() == ENVIRONMENT for text in rewards)
