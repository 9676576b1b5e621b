"""Hints that are the beginning of a known solution, as long as the failures of the plain samples ask for."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from jaxrl_llm.core.ranges import Fraction, NonNegative, check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Demands, Rollout
from jaxrl_llm.rollouts.context import Task, Tools
from jaxrl_llm.rollouts.episode import Episode, known_scores
from jaxrl_llm.rollouts.guidance.prefixes import continued, responses_of
from jaxrl_llm.rollouts.guidance.repair import marked
from jaxrl_llm.rollouts.programs import scored_samples
from jaxrl_llm.utils.errors import InputError


def failure_rate(episodes: Sequence[Episode]) -> float:
    """1 - the mean reward of those that are scored, within [0, 1]; 0 where none is."""
    known = known_scores(episodes)
    return min(max(1 - float(known.mean()), 0.0), 1.0) if known.size else 0.0


def hint_ratio(failure: float, low: float = 0.1, high: float = 0.9, noise: float = 0.0) -> float:
    """(high - low) failure + low + noise, within [0, 1]; 0 without failures (2512.13095).

    >>> round(hint_ratio(0.75), 6), hint_ratio(0.0)
    (0.7, 0.0)
    """
    return min(max((high - low) * failure + low + noise, 0.0), 1.0) if failure > 0 else 0.0


@part
def hinted_by_failures(
    column: str = "solution", hinted: int = 4, low: Fraction = 0.1, high: Fraction = 0.9, noise: NonNegative = 0.0
) -> Rollout:  # fmt: skip
    """A group of plain samples, and `hinted` more that begin with a part of a known solution, longer the more fail.

    column: a text, or a list of texts of which the first is taken. Its first floor(w T) of T tokens, but fewer than the
    limit, are given to all the further samples of the group, with w the `hint_ratio` of the plain samples'
    `failure_rate` and, for each group, a normal number with the standard deviation `noise`. Rewards must be within 0
    and 1, and are those of hint and continuation together. Without failures, or without a solution, there are no
    further samples.

    Hints are trained on: they are actions, with the `behaviour_logp` 0. Provides info["hint_tokens"], how many a row
    begins with; info["guided"] is 1 for rows with some, and info["unhinted"] in a group that failed without a solution.
    """
    check_number("hinted", hinted, least=1, whole=True)
    if low > high:
        raise InputError(f"hints are of {low:g} to {high:g} of a solution: give low, then high")

    async def program(tools: Tools, task: Task) -> list[Episode]:
        plain = await scored_samples(tools, task.prompt, range(task.samples))
        plain = [e.with_info(guided=0.0, prefix=0.0, hint_tokens=0.0) for e in plain]
        solutions, failure = responses_of(tools, task, column), failure_rate(plain)
        if not solutions or not failure:
            return marked(plain, float(failure > 0))
        ids = solutions[0]
        ratio = hint_ratio(failure, low, high, noise * float(tools.random("hint").normal()))
        length = min(math.floor(ratio * len(ids) + 1e-9), task.limit - 1)  # 0.7 * 10 may be 6.999...
        if length < 1:
            return marked(plain)
        helped = await continued(tools, task, [ids[:length]] * hinted, task.samples)
        return marked([*plain, *(acted(e).with_info(guided=1.0, hint_tokens=float(length)) for e in helped)])

    return Rollout(
        program,
        f"hinted_by_failures({column})",
        frozenset({"hint_tokens"}),
        (column,),
        demands=Demands(variable_size=True),
    )


def acted(episode: Episode) -> Episode:
    """The episode whose given tokens are actions, too."""
    return replace(episode, segments=tuple(segment._replace(sampled=True) for segment in episode.segments))
