"""Conversations and trees among the completions of a report: turns, folded observations, and what paths share."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_llm.reporting.html.shading import visible
from jaxrl_llm.reporting.statistics import as_number

SUMMARY, MOST = 80, 600  # characters of an observation that are shown folded and unfolded; a page has thousands


def marks(line: Mapping[str, Any]) -> dict[int, list[str]]:
    """HTML to put before the tokens with these numbers: labels of turns with their rewards, and observations.

    line: of completions.jsonl. What a path of a tree shares with an earlier one is folded.
    """
    found: dict[int, list[str]] = {}
    if begins := line.get("begins"):
        sample, shared = begins[0], min(begins[1], len(line["tokens"]))
        words = f"begins with {shared} token{'s' if shared != 1 else ''} of sample {sample + 1}"
        found.setdefault(0, []).append(f'<details class="shared"><summary>{words}</summary>')
        found.setdefault(shared, []).append("</details>")
    given, rewards = line.get("given") or [], line.get("turn_rewards") or []
    if not given and not rewards:
        return found
    first, starts = int(line.get("turn") or 0), [0, *(before for before, _ in given)]
    for number, start in enumerate(starts):
        if number:
            found.setdefault(start, []).append(observation(given[number - 1][1]))
        if start < len(line["tokens"]):
            reward = as_number(rewards[number]) if number < len(rewards) else math.nan
            said = f"turn {first + number + 1}" + (f", reward {reward:.3g}" if math.isfinite(reward) else "")
            found.setdefault(start, []).append(f'<span class="turn">{said}</span>')
    return found


def observation(text: str) -> str:
    """HTML of what was given between two replies, folded to its first characters.

    >>> observation("<b>7")
    '<details class="given"><summary>&lt;b&gt;7</summary>&lt;b&gt;7</details>'
    """
    line = " ".join(text.split())
    short = line if len(line) <= SUMMARY else f"{line[:SUMMARY]}…"
    more = f"<em>[{len(text) - MOST:,} characters left out]</em>" if len(text) > MOST else ""
    return f'<details class="given"><summary>{visible(short)}</summary>{visible(text[:MOST])}{more}</details>'


def as_tree(samples: Sequence[Mapping[str, Any]]) -> list[tuple[int, Mapping[str, Any]]]:
    """The samples of a group with how deep each forks off: 0 for one that shares nothing with those before it.

    >>> [depth for depth, _ in as_tree([{}, {"begins": [0, 3]}, {"begins": [1, 5]}, {}])]
    [0, 1, 2, 0]
    """
    found: list[int] = []
    for sample in samples:
        begins = sample.get("begins")
        found.append(found[begins[0]] + 1 if begins and begins[0] < len(found) else 0)
    return list(zip(found, samples, strict=True))


def common_prefix(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    """The number of leading entries that are equal.

    >>> common_prefix(np.array([1, 1, 2]), np.array([1, 1, 3, 4]))
    2
    """
    size = min(len(one), len(other))
    differs = np.flatnonzero(one[:size] != other[:size])
    return int(differs[0]) if differs.size else size
