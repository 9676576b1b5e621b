"""Comparisons of responses, each pair in both orders: win rates, and how much of them is the position's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core.arguments.ranges import Count
from jaxrl_llm.core.repr import layout, part
from jaxrl_llm.core.rollout import Task
from jaxrl_llm.rewards.judges.questions import Comparison
from jaxrl_llm.rollouts.auxiliary_prompts import problem_text
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, sampled_ids
from jaxrl_llm.rollouts.judges.answerers import Answerer, answerer

Array = np.ndarray[Any, Any]


def mean_verdict(verdicts: Sequence[float | None]) -> float:
    """The mean of those that are stated; NaN if none is."""
    known = [one for one in verdicts if one is not None]
    return sum(known) / len(known) if known else float("nan")


class PairVerdicts(NamedTuple):
    """Of P pairs (i, j): how often the response that is shown first wins, f64[P] from 0 to 1, NaN without a verdict."""

    forward: Array  # i is shown first
    swapped: Array  # j is shown first

    @property
    def wins(self) -> Array:
        """f64[P]: the probability that i beats j, (forward + 1 - swapped) / 2, in which a bonus of a place cancels.

        NaN unless both orders have a verdict.
        """
        return np.asarray((self.forward + 1 - self.swapped) / 2)

    @property
    def position_bias(self) -> float:
        """How much more often the response that is shown first wins than the other, -1 to 1; NaN without verdicts.

        Over pairs with verdicts in both orders, so that it is 0 for a judge that reads nothing but the responses.
        """
        both = self.forward + self.swapped - 1
        known = both[~np.isnan(both)]
        return float(known.mean()) if known.size else float("nan")

    @property
    def consistent(self) -> float:
        """Share of pairs whose verdict is the same in both orders; NaN without verdicts."""
        known = ~np.isnan(self.forward + self.swapped)
        same = np.sign(self.forward - 0.5) == -np.sign(self.swapped - 0.5)
        return float(same[known].mean()) if known.any() else float("nan")


def win_matrix(size: int, pairs: Sequence[tuple[int, int]], wins: Array) -> Array:
    """P f64[size, size]: P[i, j] is the probability that i beats j; 1/2 with itself, NaN where nothing is known."""
    matrix = np.full((size, size), np.nan)
    np.fill_diagonal(matrix, 0.5)
    for (i, j), win in zip(pairs, wins, strict=True):
        matrix[i, j], matrix[j, i] = win, 1 - win
    return matrix


def row_win_rates(matrix: Array, itself: bool = False) -> Array:
    """f64[n]: the mean of each row's known entries, but its own unless `itself` (SPO, 2401.04056); NaN where none is.

    >>> row_win_rates(np.array([[0.5, 0.9, 0.2], [0.1, 0.5, 0.6], [0.8, 0.4, 0.5]])).round(2).tolist()
    [0.55, 0.35, 0.6]
    """
    others = ~np.isnan(matrix) & (itself | ~np.eye(len(matrix), dtype=bool))
    total = np.where(others, matrix, 0.0).sum(1)
    return np.where(others.any(1), total / np.maximum(others.sum(1), 1), np.nan)


Pair = tuple[str, str]


@dataclass(frozen=True, repr=False)
class PairJudge:
    """How pairs are compared. samples: answers to each question, of whose verdicts the mean counts."""

    by: Answerer
    comparison: Comparison = field(default_factory=Comparison)
    samples: int = 1

    __repr__ = layout

    async def compare(self, tools: Tools, problem: str, task: Task, pairs: Sequence[Pair], first: int = 0) -> Compared:
        """The verdicts of pairs in both orders. first: number of the program's questions times samples so far."""
        ask = self.comparison.text
        forward, swapped = ([ask(problem, *one) for one in pairs], [ask(problem, *one[::-1]) for one in pairs])
        said = await self.by.once_each(tools, task, [*forward, *swapped], self.samples, first)
        verdicts = [[self.comparison.verdict(text) for text in texts] for texts in said]
        means = np.asarray([mean_verdict(one) for one in verdicts], np.float64)
        return Compared(
            PairVerdicts(means[: len(pairs)], means[len(pairs) :]),
            *count_verdicts(verdicts, self.samples), next((text for texts in said for text in texts), ""), verdicts,
        )  # fmt: skip


class Compared(NamedTuple):
    """Verdicts of pairs, and how many answers were asked for and stated none."""

    verdicts: PairVerdicts
    asked: int
    unparsed: int
    example: str
    each: Sequence[Sequence[float | None]]
    """The verdict of each answer: first to the pairs as they are, then to the swapped ones."""

    @property
    def metrics(self) -> dict[str, float]:
        """See `judged`."""
        wins = self.verdicts.wins
        known = wins[~np.isnan(wins)]
        return {
            **counts(self.asked, self.unparsed),
            "judge/position_bias": self.verdicts.position_bias,
            "judge/consistent": self.verdicts.consistent,
            "judge/ties": float((known == 0.5).mean()) if known.size else math.nan,
        }


def counts(asked: int, unparsed: int) -> dict[str, float]:
    """Metrics of all judges."""
    return {"judge/asked": float(asked), "judge/unparsed": unparsed / asked if asked else math.nan}


def count_verdicts(verdicts: Sequence[Sequence[float | None]], samples: int) -> tuple[int, int]:
    """How many answers were asked for, and how many of them state no verdict."""
    asked = samples * len(verdicts)
    return asked, asked - sum(one is not None for some in verdicts for one in some)


def sampled_texts(tools: Tools, episodes: Sequence[Episode]) -> list[str]:
    """The sampled texts of episodes."""
    return [tools.decode(sampled_ids(one)) for one in episodes]


@part
def pair_judge(by: Answerer | str = "policy", comparison: Comparison | None = None, samples: Count = 1) -> PairJudge:
    """Who compares pairs, and how. by: an `Answerer`, or a text that `answerers.answerer` reads."""
    return PairJudge(answerer(by), comparison or Comparison(), samples)


async def matrix_of(
    judge: PairJudge, tools: Tools, task: Task, episodes: Sequence[Episode]
) -> tuple[np.ndarray[Any, Any], Compared]:
    """P f64[n, n], how often each response beats each other one, and the verdicts. Equal texts are equally good."""
    texts = sampled_texts(tools, episodes)
    every = list(itertools.combinations(range(len(texts)), 2))
    differ = [(i, j) for i, j in every if texts[i] != texts[j]]
    compared = await judge.compare(tools, problem_text(tools, task), task, [(texts[i], texts[j]) for i, j in differ])
    equal = [pair for pair in every if pair not in set(differ)]
    wins = np.concatenate([compared.verdicts.wins, np.full(len(equal), 0.5)])
    return win_matrix(len(texts), [*differ, *equal], wins), compared
