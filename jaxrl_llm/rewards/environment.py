"""Rewards that episodes have: `environment`, from their environment, and `given`, from the data set."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

ENVIRONMENT = "environment"
GIVEN = "given"


def environment(completions: list[Any]) -> list[float]:
    """Episodes have this reward from their environment, so that it is never computed from completions.

    Raises ValueError: the completions are of no environment.
    """
    raise ValueError("these completions were sampled without an environment: give one, --environment MODULE:NAME")


def given(completions: list[Any]) -> list[float]:
    """Responses of a data set have this reward, so that it is never computed from completions.

    Raises ValueError: the completions were sampled.
    """
    raise ValueError("these completions were sampled, so that no reward was given with them: name a reward function")


def is_among(rewards: Iterable[str]) -> bool:
    """Whether one of the reward specs NAME[*WEIGHT] is `environment`; a function of that name in a file is not.

    >>> is_among(["number_match", "environment*0.5"]), is_among(["my.py:environment"])
    (True, False)
    """
    return any(text.partition("*")[0].strip() == ENVIRONMENT for text in rewards)
