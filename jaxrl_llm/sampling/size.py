"""The capacity of an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from jaxrl_llm.buckets import bucket
from jaxrl_llm.sampling.requests import Request
from jaxrl_llm.sampling.schedule import Shape, plan


class Size(NamedTuple):
    """Numbers of rows and slots, and the lengths of prompts and completions that fit."""

    shape: Shape
    width: int  # most tokens of a prompt
    tokens: int  # most tokens of a completion

    def fits(self, request: Request) -> bool:
        """Whether a request's prompt and completion fit."""
        return len(request.prompt) <= self.width and request.limit <= self.tokens


def size_for(requests: Sequence[Request], slots: int = 0, devices: int = 1, shape: Shape | None = None) -> Size:
    """The capacity for these requests. slots, devices, shape: see `stream` and `schedule.plan`."""
    shape = shape or plan([request.prompt for request in requests], slots, devices)
    width = bucket(max(len(request.prompt) for request in requests))
    return Size(shape, width, bucket(max(request.limit for request in requests), least=4))
