"""Groups whose reward is a judge's verdict: win rates, wins against an anchor, grades, rubrics and constraints."""

import logging
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core.arguments.ranges import Count
from jaxrl_llm.core.repr import layout, part
from jaxrl_llm.core.rollout import Rollout, Task
from jaxrl_llm.data.chat.messages import text_of_content
from jaxrl_llm.rewards.judges.questions import Grading, grading
from jaxrl_llm.rewards.specs import JUDGE
from jaxrl_llm.rollouts.auxiliary_prompts import problem_text
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.judges.answerers import Answerer, answerer
from jaxrl_llm.rollouts.judges.comparisons import (
    PairJudge,
    count_verdicts,
    counts,
    matrix_of,
    mean_verdict,
    pair_judge,
    row_win_rates,
    sampled_texts,
)
from jaxrl_llm.rollouts.programs import altered, group, scored_where
from jaxrl_llm.utils.errors import InputError, shown

logger = logging.getLogger("jaxrl_llm.rollouts")
OPPONENTS = "opponents"  # entry of info: of how many others in its group a verdict on the response is known


class Judged(NamedTuple):
    """What a judge says of a group of n responses."""

    scores: Sequence[float]  # [n]; NaN where no verdict was stated: such a response is not trained on
    metrics: Mapping[str, float]  # by name; NaN where there is nothing to measure
    info: Mapping[str, Sequence[float]] = {}  # further numbers of each response
    example: str = ""  # an answer, to show where none states a verdict


Judge = Callable[[Tools, Task, Sequence[Episode]], Awaitable[Judged]]


@dataclass(frozen=True, repr=False)
class Judging:
    """A judge: an async function (tools, task, episodes of a group) -> `Judged`, and what a run must know of it."""

    judge: Judge
    reference: bool = False  # whether the reference policy answers
    columns: tuple[str, ...] = ()  # columns of the data set that it reads
    provides: frozenset[str] = frozenset()  # names of needs among the `info` of what it says

    __repr__ = layout


@part
def judged(judging: Judging, rollout: Rollout | None = None) -> Rollout:
    """A rollout, `group` by default, whose episodes have a judge's score as the component `judge` of their reward.

    The run's rewards combine it with others (`--rewards judge 'format_match(...)*0.2'`). An episode without a verdict
    has no score, so that it is not trained on; a line of the log says so of the first group without any.

    Metrics, means over groups, each where it is measured: "judge/asked", questions; "judge/unparsed", the share of
    answers that are missing or state no verdict; and of pairs in both orders "judge/position_bias", how much more often
    the response that is shown first wins (-1 to 1), "judge/consistent", the share of pairs whose verdict both orders
    share, and "judge/ties".
    """
    inner, said = rollout or group(), list[str]()

    async def program(tools: Tools, task: Task) -> list[Episode]:
        episodes = list(await inner.program(tools, task))
        found = await judging.judge(tools, task, episodes)
        if not said and found.metrics.get("judge/unparsed") == 1:
            said.append(found.example)
            logger.warning(
                "the judge states no verdict on any response to prompt %d, which are not trained on, and neither are "
                "others of the kind (judge/unparsed): an answer is %s",
                *(task.prompt_id, shown(found.example) if found.example else "missing"),
            )
        return await with_verdicts(tools, episodes, found)

    reference = inner.demands.reference or judging.reference
    provides = judging.provides | {JUDGE}
    return altered(inner, program, "judged", provides, judging.columns, at_once=False, reference=reference)


async def with_verdicts(tools: Tools, episodes: Sequence[Episode], found: Judged) -> list[Episode]:
    """The episodes with a judge's scores among their rewards, and its metrics and numbers in `info`."""
    known = {name: value for name, value in found.metrics.items() if not math.isnan(value)}
    each = [
        replace(one, rewards={JUDGE: float(score)}).with_info(
            **known, **{name: float(values[place]) for name, values in found.info.items()}
        )
        for place, (one, score) in enumerate(zip(episodes, found.scores, strict=True))
    ]
    return await scored_where(tools, each, [not math.isnan(score) for score in found.scores])


@part
def by_win_rate(judge: PairJudge | None = None) -> Judging:
    """The score of a response is its mean win rate against the others of its group, 0 to 1; all pairs, both orders."""
    own = judge or pair_judge()

    async def of_group(tools: Tools, task: Task, episodes: Sequence[Episode]) -> Judged:
        matrix, compared = await matrix_of(own, tools, task, episodes)
        info = {OPPONENTS: (~np.isnan(matrix)).sum(1) - 1.0}
        return Judged(row_win_rates(matrix).tolist(), compared.metrics, info, compared.example)

    return Judging(of_group, own.by.reference, provides=frozenset({OPPONENTS}))


@part
def against_anchor(column: str = "anchor", judge: PairJudge | None = None) -> Judging:
    """The score of a response is the probability that it beats the response in a column, 0 to 1; both orders."""
    own = judge or pair_judge()

    async def of_group(tools: Tools, task: Task, episodes: Sequence[Episode]) -> Judged:
        anchor = text_in(task, column)
        pairs = [(text, anchor) for text in sampled_texts(tools, episodes)]
        compared = await own.compare(tools, problem_text(tools, task), task, pairs)
        return Judged(compared.verdicts.wins.tolist(), compared.metrics, example=compared.example)

    return Judging(of_group, own.by.reference, (column,))


@part
def by_grade(by: Answerer | str = "policy", question: Grading | None = None, samples: Count = 1) -> Judging:
    """The score of a response is the mean of `samples` grades, 0 to 1. question: by default from 1 to 10."""
    who, asked = answerer(by), question or grading()

    async def of_group(tools: Tools, task: Task, episodes: Sequence[Episode]) -> Judged:
        problem = problem_text(tools, task)
        questions = [(asked, problem, text, "") for text in sampled_texts(tools, episodes)]
        verdicts, example = await ask_grades(who, tools, task, questions, samples)
        return Judged(
            [mean_verdict(one) for one in verdicts], counts(*count_verdicts(verdicts, samples)), example=example
        )

    return Judging(of_group, who.reference)


async def ask_grades(
    by: Answerer, tools: Tools, task: Task, asked: Sequence[tuple[Grading, str, str, str]], samples: int, first: int = 0
) -> tuple[list[list[float | None]], str]:
    """The verdicts of (question, problem, response, criterion), and an answer. first: see `PairJudge.compare`."""
    said = await by.once_each(tools, task, [question.text(*one) for question, *one in asked], samples, first)
    verdicts = [[question.verdict(text) for text in texts] for (question, *_), texts in zip(asked, said, strict=True)]
    return verdicts, next((text for texts in said for text in texts), "")


@dataclass(frozen=True, repr=False)
class Criterion:
    """What a response should meet, and how much it counts; a fault has a weight below 0."""

    text: str
    weight: float = 1.0

    __repr__ = layout


@part
def by_criteria(
    criteria: Sequence[Criterion | str] | str, by: Answerer | str = "policy", question: Grading | None = None,
    samples: Count = 1, every: bool = False,
) -> Judging:  # fmt: skip
    """The score of a response is the share of criteria that it meets, weighted: a rubric.

    sum of weights of those met / sum of weights above 0, within 0 to 1. criteria: texts and `Criterion`s, or the name
    of a column with a list of texts, or of {"criterion": text, "weight": number}. every: the score is 1 where all
    are met by more than half of the verdicts, else 0: constraints. One with a criterion without a verdict has no score.
    """
    who, asked = answerer(by), question or Grading()
    column = criteria if isinstance(criteria, str) else None
    fixed = () if isinstance(criteria, str) else criteria_of(criteria, "the judge")

    async def of_group(tools: Tools, task: Task, episodes: Sequence[Episode]) -> Judged:
        own = fixed if column is None else criteria_of(task.row.get(column), f"prompt {task.prompt_id}, {column}")
        texts = sampled_texts(tools, episodes)
        return await met_by(who, lambda one: asked, tools, task, problem_text(tools, task), own, texts, samples, every)

    return Judging(of_group, who.reference, () if column is None else (column,))


async def met_by(
    by: Answerer, question: Callable[[Criterion], Grading], tools: Tools, task: Task, problem: str,
    criteria: Sequence[Criterion], texts: Sequence[str], samples: int = 1, every: bool = False, first: int = 0,
) -> Judged:  # fmt: skip
    """How well responses meet criteria, see `by_criteria`, each of which has a question of its own."""
    each = [(question(one), problem, text, one.text) for text in texts for one in criteria]
    verdicts, example = await ask_grades(by, tools, task, each, samples, first)
    marks = np.asarray([mean_verdict(one) for one in verdicts]).reshape(len(texts), len(criteria))
    scores = rubric_scores(marks, [one.weight for one in criteria], every)
    return Judged(scores.tolist(), counts(*count_verdicts(verdicts, samples)), example=example)


def criteria_of(value: Any, where: str) -> tuple[Criterion, ...]:
    """Criteria from texts, `Criterion`s and dicts; InputError where there are none, or none has a weight above 0."""
    listed = value if isinstance(value, list | tuple) else ()
    found = [
        one if isinstance(one, Criterion)
        else Criterion(one) if isinstance(one, str)
        else Criterion(str(one["criterion"]), float(one.get("weight", 1.0)))
        if isinstance(one, Mapping) and "criterion" in one else None
        for one in listed
    ]  # fmt: skip
    known = tuple(one for one in found if one is not None)
    if len(known) != len(found) or not any(one.weight > 0 for one in known):
        raise InputError(
            f'{where} has the criteria {shown(value)}: give a list of texts, or of {{"criterion": TEXT, "weight": '
            "NUMBER}, one of them with a weight above 0"
        )
    return known


def rubric_scores(marks: np.ndarray[Any, Any], weights: Sequence[float], every: bool = False) -> np.ndarray[Any, Any]:
    """Scores f64[n] of marks f64[n, criteria], see `by_criteria`; NaN where one is.

    >>> rubric_scores(np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 1.0]]), [3, 1, -2]).tolist()
    [0.75, 0.5]
    """
    w, unknown = np.asarray(weights, np.float64), np.isnan(marks).any(1)
    if every:
        fine = np.where(w > 0, marks > 0.5, marks <= 0.5).all(1)
        return np.where(unknown, np.nan, fine.astype(np.float64))
    return np.where(unknown, np.nan, np.clip(np.nan_to_num(marks) @ w / w[w > 0].sum(), 0.0, 1.0))


def text_in(task: Task, column: str) -> str:
    """The response in a column, a text or messages; InputError for anything else."""
    said = task.row.get(column)
    if isinstance(said, list | tuple) and said and isinstance(said[-1], Mapping) and "content" in said[-1]:
        said = text_of_content(said[-1]["content"])
    if not isinstance(said, str):
        raise InputError(f"prompt {task.prompt_id} has no response in the column {column!r}: {shown(said)}")
    return said


@part
def judged_pairs(by: str = "policy", samples: Count = 1) -> Rollout:
    """`judged` groups whose score is `by_win_rate`."""
    return judged(by_win_rate(pair_judge(by, samples=samples)))


@part
def judged_anchor(column: str = "anchor", by: str = "policy", samples: Count = 1) -> Rollout:
    """`judged` groups whose score is `against_anchor`."""
    return judged(against_anchor(column, pair_judge(by, samples=samples)))


@part
def judged_grades(by: str = "policy", samples: Count = 1) -> Rollout:
    """`judged` groups whose score is `by_grade`."""
    return judged(by_grade(by, samples=samples))


@part
def judged_rubric(column: str = "rubric", by: str = "policy", samples: Count = 1) -> Rollout:
    """`judged` groups whose score is `by_criteria` of a column."""
    return judged(by_criteria(column, by, samples=samples))
