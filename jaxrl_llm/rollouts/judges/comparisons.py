"""Comparisons of responses, each pair in both orders."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core.arguments.ranges import Count
from jaxrl_llm.core.repr import layout, part
from jaxrl_llm.rewards.judges.questions import Comparison
from jaxrl_llm.rewards.judges.verdicts import PairVerdicts, mean_verdict, win_matrix
from jaxrl_llm.rollouts.auxiliary_prompts import problem_text
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, sampled_ids
from jaxrl_llm.rollouts.judges.answerers import Answerer, answerer
from jaxrl_llm.rollouts.program_host import Task

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
            *counted(verdicts, self.samples), next((text for texts in said for text in texts), ""), verdicts,
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


def counted(verdicts: Sequence[Sequence[float | None]], samples: int) -> tuple[int, int]:
    """How many answers were asked for, and how many of them state no verdict."""
    asked = samples * len(verdicts)
    return asked, asked - sum(one is not None for some in verdicts for one in some)


def texts_of(tools: Tools, episodes: Sequence[Episode]) -> list[str]:
    """The sampled texts."""
    return [tools.decode(sampled_ids(one)) for one in episodes]


@part
def pair_judge(by: Answerer | str = "policy", comparison: Comparison | None = None, samples: Count = 1) -> PairJudge:
    """Who compares pairs, and how. by: an `Answerer`, or a text that `answerers.answerer` reads."""
    return PairJudge(answerer(by), comparison or Comparison(), samples)


async def matrix_of(
    judge: PairJudge, tools: Tools, task: Task, episodes: Sequence[Episode]
) -> tuple[np.ndarray[Any, Any], Compared]:
    """P f64[n, n], how often each response beats each other one, and the verdicts. Equal texts are equally good."""
    texts = texts_of(tools, episodes)
    every = list(itertools.combinations(range(len(texts)), 2))
    differ = [(i, j) for i, j in every if texts[i] != texts[j]]
    compared = await judge.compare(tools, problem_text(tools, task), task, [(texts[i], texts[j]) for i, j in differ])
    equal = [pair for pair in every if pair not in set(differ)]
    wins = np.concatenate([compared.verdicts.wins, np.full(len(equal), 0.5)])
    return win_matrix(len(texts), [*differ, *equal], wins), compared
