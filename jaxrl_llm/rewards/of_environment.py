"""The reward `environment`: what the environment of an episode gave for it."""

from __future__ import annotations

from typing import Any

ENVIRONMENT = "environment"


def environment(completions: list[Any]) -> list[float]:
    """Episodes have this reward from their environment, so that it is never computed from completions.

    Raises ValueError: the completions are of no environment.
    """
    raise ValueError("these completions were sampled without an environment: give one, --environment MODULE:NAME")
