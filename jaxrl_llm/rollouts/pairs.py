"""Online preferences: the best and the worst of a group as a pair, and win rates within it."""

import math
from asyncio import gather
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core.hooks import Hook
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Demands, Rollout, Task
from jaxrl_llm.rewards.specs import JUDGE
from jaxrl_llm.rollouts.auxiliary_prompts import problem_text
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, sampled_ids
from jaxrl_llm.rollouts.judges.comparisons import PairJudge, row_win_rates
from jaxrl_llm.rollouts.judges.judged import OPPONENTS, Judged, with_verdicts
from jaxrl_llm.rollouts.programs import altered, group, samples

Array = np.ndarray[Any, Any]
WIN_RATE, SAMPLED = "win_rate", "rollout/sampled_reward"
Oracle = Callable[[Array], Array]  # differences of scores -> how often the first of the two wins


async def score_missing(tools: Tools, episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes with rewards, those that have none scored together."""
    if all(one.reward is not None for one in episodes):
        return list(episodes)
    return await tools.score(episodes)


@part
def best_and_worst_of(rollout: Rollout | None = None) -> Rollout:
    """The episodes of the highest and the lowest reward of each group, `group` by default, as a pair.

    The others are sampled and scored, but not trained on; equals count in their order, and a group whose rewards are
    all equal has no pair. Rewards of components and of a judge stay those of the group. It goes around a rollout that
    the run chooses. Metric: "rollout/sampled_reward", the mean reward of all that was sampled.
    """
    inner = rollout or group()

    async def program(tools: Tools, task: Task) -> list[Episode]:
        episodes = await score_missing(tools, await inner.program(tools, task))
        best, worst = best_and_worst_place([one.score for one in episodes])
        known = [one.score for one in episodes if not math.isnan(one.score)]
        mean = {SAMPLED: sum(known) / len(known)} if known else {}
        return [episodes[place].with_info(**mean) for place in (best, worst)]

    return altered(
        inner, program, "best and worst", wrap=best_and_worst_of, at_once=False, variable_size=True,
        max_episodes=lambda samples: 2, min_samples=max(2, inner.demands.min_samples),
    )  # fmt: skip


def best_and_worst_place(scores: Sequence[float]) -> tuple[int, int]:
    """Places of the highest score and of another one, the lowest; NaN only where fewer than two are known.

    >>> [best_and_worst_place(scores) for scores in ([1.0, 3.0, np.nan, 0.0, 3.0], [1.0, 1.0, 1.0], [np.nan, 2.0])]
    [(1, 3), (0, 1), (1, 0)]
    """
    values = np.asarray(scores, np.float64)
    best = int(np.argmax(np.where(np.isnan(values), -np.inf, values)))
    others = [place for place in range(len(values)) if place != best]
    return best, min(others, key=lambda place: np.inf if np.isnan(values[place]) else values[place])


def bradley_terry(difference: Array) -> Array:
    """1 / (1 + exp(-d)): the scores are log-odds."""
    return np.asarray(0.5 * (1 + np.tanh(0.5 * difference)))


def higher(difference: Array) -> Array:
    """1 for the higher score, 1/2 for equal ones."""
    return np.asarray(0.5 * (1 + np.sign(difference)))


def rates_of(scores: Sequence[float], oracle: Oracle, itself: bool = False) -> Array:
    """f64[n]: the mean over the known others j of oracle(score_i - score_j); NaN where there is none.

    itself: over itself as well, against which a response wins half of the time.
    """
    values = np.asarray(scores, np.float64)
    wins = oracle(values[:, None] - values)
    np.fill_diagonal(wins, np.where(np.isnan(values), np.nan, 0.5))
    return row_win_rates(wins, itself)


@part
def with_win_rates(rollout: Rollout | None = None, oracle: Oracle = bradley_terry, itself: bool = False) -> Rollout:
    """A rollout whose episodes have info["win_rate"]: how often they beat the others of their group.

    Of a judge of pairs (`judges.judged.by_win_rate`) it is what that found; otherwise oracle makes it of differences of
    the rewards. itself: the group has the episode too, against which it wins half of the time, as `rates_of` has it.
    """
    inner = rollout or group()

    async def program(tools: Tools, task: Task) -> list[Episode]:
        episodes = await score_missing(tools, await inner.program(tools, task))
        if OPPONENTS in inner.provides:
            rates = np.asarray([one.rewards.get(JUDGE, math.nan) for one in episodes])
            others = np.asarray([one.info[OPPONENTS] for one in episodes])
            rates = (others * rates + 0.5) / (others + 1) if itself else rates
        else:
            rates = rates_of([one.score for one in episodes], oracle, itself)
        return [one.with_info(win_rate=float(rate)) for one, rate in zip(episodes, rates, strict=True)]

    return altered(
        inner, program, "win rates", {WIN_RATE}, wrap=lambda other: with_win_rates(other, oracle, itself),
        at_once=False, min_samples=max(2, inner.demands.min_samples),
    )  # fmt: skip


@part
def against_opponent(judge: PairJudge | None = None, mixture: Hook | None = None, trained: bool = False) -> Rollout:
    """Samples of the policy, and for each of them one of an opponent to the same prompt, which it is compared with.

    The opponent is the reference policy, or what a hook makes of it and the policy (`Hook.opponent`). A sample's
    info["win_rate"] is the probability that it beats the opponent's: a judge's verdict in both orders, else
    `bradley_terry` of the difference of their rewards. trained: the opponent's samples are rows too, with
    info["opponent"] 1 and the other win rate, and each pair is a group of its own.
    """

    async def program(tools: Tools, task: Task) -> list[Episode]:
        n = task.samples
        own, theirs = await gather(
            samples(tools, task.prompt, range(n)),
            gather(*(tools.sample(task.prompt, number=n + i, reference=True) for i in range(n))),
        )
        if judge is None:
            every = await tools.score([*own, *theirs])
            rates = bradley_terry(np.asarray([a.score - b.score for a, b in zip(every[:n], every[n:], strict=True)]))
        else:
            texts = [tools.decode(sampled_ids(one)) for one in (*own, *theirs)]
            pairs = list(zip(texts[:n], texts[n:], strict=True))
            found = await judge.compare(tools, problem_text(tools, task), task, pairs)
            rates = np.where([a == b for a, b in pairs], 0.5, found.verdicts.wins)
            verdicts = Judged([*rates, *(1 - rates)], found.metrics, example=found.example)
            every = await with_verdicts(tools, [*own, *theirs], verdicts)
        if not trained:
            return [one.with_info(win_rate=float(rate)) for one, rate in zip(every[:n], rates, strict=True)]
        both = zip(every, [*rates, *(1 - rates)], strict=True)
        return [
            one.in_part(number % n).with_info(win_rate=float(rate), opponent=float(number >= n))
            for number, (one, rate) in enumerate(both)
        ]

    provides = {WIN_RATE, *(["opponent"] if trained else []), *([JUDGE] if judge else [])}
    demands = Demands(reference=True, variable_size=trained, max_episodes=(lambda G: 2 * G) if trained else None)
    return Rollout(program, "against_opponent", frozenset(provides), demands=demands, drawing=mixture)
