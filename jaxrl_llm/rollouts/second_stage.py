"""Rollout programs whose first samples decide how many more there are."""

from __future__ import annotations

import math
from asyncio import gather
from collections.abc import Sequence
from typing import Literal

import numpy as np

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.rollouts.context import Task, Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.utils.errors import require_choice


def extra_samples(rate: float, first: int, most: int, rule: Literal["equal", "hard"], scaled: bool = False) -> int:
    """Samples beside the `first` ones, after which a prompt's advantages add up to a target; 0 from a rate of 0.5 on.

    N samples at the success rate a have advantages r - a whose sizes add up to N S, S = 2 a (1 - a), which is N/2 at
    most; divided by the standard deviation (scaled) S = 2 sqrt(a (1 - a)), and N at most. The target of "equal" is that
    peak, and of "hard" 2 (1 - a) times the peak. A rate of 0 counts as 0.5/N. With the first there are at most `most`.

    >>> [extra_samples(right / 8, 8, 64, "equal") for right in range(5)]
    [27, 11, 3, 1, 0]
    """
    if rate >= 0.5:
        return 0
    a = 0.5 / first if rate < 1e-6 else rate
    share, peak = (2 * math.sqrt(a * (1 - a)), first) if scaled else (2 * a * (1 - a), first / 2)
    target = peak if rule == "equal" else 2 * (1 - a) * peak
    return max(0, min(math.ceil((target - first * share) / share - 1e-9), most - first))


@part
def topped_up(most: int = 32, rule: Literal["equal", "hard"] = "equal", scaled: bool = False) -> Rollout:
    """A group of samples, and a second stage with more of them for prompts that fewer than half of the first solve.

    See `extra_samples` for their number; `most` bounds the group. The success rate is the mean reward of the first
    samples, each clipped to [0, 1]; without a score there is no second stage. Groups differ in size.
    """
    require_choice("topped_up: rule", rule, ("equal", "hard"))
    check_number("topped_up: most", most, least=2, whole=True)

    async def program(tools: Tools, task: Task) -> list[Episode]:
        numbers = range(task.samples)
        first = await tools.score(await gather(*(tools.sample(task.prompt, number=i) for i in numbers)))
        rate = success_rate(first)
        extra = 0 if rate is None else extra_samples(rate, len(first), most, rule, scaled)
        if not extra:
            return first
        later = range(task.samples, task.samples + extra)
        return [*first, *await tools.score(await gather(*(tools.sample(task.prompt, number=i) for i in later)))]

    return Rollout(program, f"topped_up({most}, {rule})", ragged=True, most=lambda G: max(G, most))


def success_rate(episodes: Sequence[Episode]) -> float | None:
    """The mean of the rewards, each clipped to [0, 1]; None if no episode has a score."""
    known = [episode.reward for episode in episodes if episode.reward is not None and not math.isnan(episode.reward)]
    return float(np.mean(np.clip(known, 0.0, 1.0))) if known else None
