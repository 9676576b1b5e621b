"""Why a curriculum leaves prompts out: reasons as numbers, one for each prompt, which the log and the report name."""

from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]  # here too: `records` imports JAX


class Why(IntEnum):
    """Why a prompt is not drawn now."""

    DRAWN = 0  # it may be drawn
    SOLVED = 1  # the policy solves it
    UNSOLVED = 2  # the policy failed on it
    LATER = 3  # its stage has not begun
    EARLIER = 4  # its stage is over
    EASIER = 5  # other prompts, which are harder, are drawn now
    RECENT = 6  # it was drawn a short time ago


_WORDS = (
    "drawn", "solved", "failed", "not yet admitted", "its stage is over", "others are harder", "drawn lately",
)  # fmt: skip
WORDS = dict(zip(Why, _WORDS, strict=True))


def where(reason: Why, left_out: Array) -> Array:
    """uint8[n]: the reason where `left_out` bool[n] is true, else `Why.DRAWN`."""
    return left_out.astype(np.uint8) * np.uint8(reason)


def first_reason(reasons: Iterable[Array], count: int) -> Array:
    """uint8[count]: of each prompt the first of several reasons uint8[count] to leave it out; DRAWN if there is none.

    >>> first_reason([np.array([0, 3, 0]), np.array([1, 1, 0])], 3).tolist()
    [1, 3, 0]
    """
    out = np.zeros(count, np.uint8)
    for one in reasons:
        out = out + np.asarray(one, np.uint8) * (out == Why.DRAWN)  # faster than choices by element
    return out


def left_out_metrics(why: Array, reasons: Sequence[Why]) -> dict[str, float]:
    """The share of prompts that are left out for each of the reasons; why: uint8[P].

    >>> left_out_metrics(np.array([0, 1, 1, 0]), (Why.SOLVED, Why.LATER))
    {'curriculum/left_out/solved': 0.5, 'curriculum/left_out/later': 0.0}
    """
    count = max(len(why), 1)
    counts = {reason: int(np.count_nonzero(why == reason)) for reason in reasons}
    return {f"curriculum/left_out/{reason.name.lower()}": number / count for reason, number in counts.items()}
