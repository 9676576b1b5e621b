"""Rewards that episodes have: `environment`, `given` with the data set, and `judge`, from the judge of a rollout."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

ENVIRONMENT = "environment"
GIVEN = "given"
JUDGE = "judge"


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


def judge(completions: list[Any]) -> list[float]:
    """Episodes have this reward from the judge of their rollout, so that it is never computed from completions.

    Raises ValueError: the completions were not judged.
    """
    raise ValueError("no judge read these completions: take a rollout that asks one, such as --rollout judged_pairs")


OWN = {ENVIRONMENT: environment, GIVEN: given, JUDGE: judge}


def is_among(rewards: Iterable[str], name: str = ENVIRONMENT) -> bool:
    """Whether one of the reward specs NAME[*WEIGHT] is `name`; a function of that name in a file is not.

    >>> is_among(["number_match", "environment*0.5"]), is_among(["my.py:environment"])
    (True, False)
    """
    return any(text.partition("*")[0].strip() == name for text in rewards)
