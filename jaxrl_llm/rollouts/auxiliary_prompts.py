"""Rollouts that ask a second question about a problem, whose answers are a group of their own in the same step.

A second prompt is the row's prompt with another text around the problem. It has no system prompt of the run.
"""

from __future__ import annotations

import logging
import math
import re
from asyncio import gather
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxrl_llm.core.arguments.ranges import Count, NonNegativeInt, check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Demands, Rollout, Task
from jaxrl_llm.data.chat.encode import encode_prompt, is_conversation, prompt_text
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, sampled_ids
from jaxrl_llm.rollouts.guidance.hints import problem_of
from jaxrl_llm.rollouts.guidance.repair import succeeds
from jaxrl_llm.rollouts.programs import samples, scored_samples

logger = logging.getLogger("jaxrl_llm.rollouts")

PREDICT = """{problem}

Do not solve this problem. Predict your own solutions of it instead, in three lines:
Length: tokens of a right solution, a whole number
Right: how many of {most} solutions will be right, a whole number from 0 to {most}
Notions: mathematical notions that a right solution uses, separated by commas"""


def problem_text(tools: Tools, task: Task) -> str:
    """The text of the problem, see `problem_of`; of a prompt of token ids, their text."""
    prompt: Any = task.row["prompt"]
    if isinstance(prompt, str) or is_conversation(prompt):
        return problem_of(task.row)
    return prompt_text(tools.tokenizer, task.prompt)


def second_prompt(tools: Tools, task: Task, text: str) -> tuple[int, ...]:
    """Token ids of the row's prompt with `text` in place of the problem."""
    prompt: Any = task.row["prompt"]
    other = [*prompt[:-1], {**prompt[-1], "content": text}] if is_conversation(prompt) else text
    ids = tools.prompt(other) if tools.encode_prompt else encode_prompt(tools.tokenizer, other)
    return tuple(map(int, ids))


async def answers(tools: Tools, task: Task, prompt: Sequence[int], count: int, part: int) -> list[Episode]:
    """`count` samples of a second prompt, as group `part` of the program.

    Their sample numbers follow those of the groups before, each of which has at most `max(count, task.samples)`. None,
    with a warning, for a prompt that fills the model's context.
    """
    if not tools.fits(prompt):
        logger.warning(
            "prompt %d: a second prompt of %d tokens fills the model's context, and is left out",
            *(task.prompt_id, len(prompt)),
        )
        return []
    first = part * max(count, task.samples)
    return [episode.in_part(part) for episode in await samples(tools, prompt, range(first, first + count))]


def graded(episode: Episode, reward: float, like: Episode) -> Episode:
    """The episode with a reward that the program computed. The run's components, those of `like`, are NaN."""
    return episode.scored(reward, dict.fromkeys(like.rewards, math.nan))


class Question(NamedTuple):
    """A question about scored responses, and the label of its right answer; None: the row's own answer."""

    text: str
    label: str | None = None


Questions = Callable[[Tools, Task, list[Episode]], Awaitable[dict[int, Question]]]


@part
def also_ask(questions: Questions, most: NonNegativeInt = 1) -> Rollout:
    """A scored group of samples, and a group of `task.samples` answers to each of the questions about it.

    questions: an async function of (tools, task, group) that returns at most so many, by the number of their group
    (info["part"]), from 1 on; samples that it draws have numbers from (1 + most) `task.samples` on. An answer's reward
    is 1 if its last \\boxed{...} is the label, else 0, and its components of the reward are NaN; without a label it is
    scored by the run's rewards, as an answer to the row.
    """

    async def program(tools: Tools, task: Task) -> list[Episode]:
        group = [one.in_part(0) for one in await scored_samples(tools, task.prompt, range(task.samples))]
        asked = await questions(tools, task, group)
        prompts = {part: second_prompt(tools, task, asked[part].text) for part in sorted(asked)}
        found = await gather(*(answers(tools, task, ids, task.samples, part) for part, ids in prompts.items()))
        more = [episode for some in found for episode in some]
        unlabelled = [one for one in more if asked[one.part].label is None]
        scored = iter(await tools.score(unlabelled) if unlabelled else ())

        def with_reward(one: Episode) -> Episode:
            if (label := asked[one.part].label) is not None:
                return graded(one, float(boxed(tools.decode(sampled_ids(one))) == label), group[0])
            like = next(scored)
            return replace(one, reward=like.reward, rewards=like.rewards)

        return [*group, *map(with_reward, more)]

    demands = Demands(variable_size=True, max_episodes=lambda G: (1 + most) * G)
    return Rollout(program, "also_ask", demands=demands)


class Prediction(NamedTuple):
    """What a policy predicts of its own solutions; None where a field is missing."""

    length: int | None
    rate: float | None  # 0 to 1
    notions: tuple[str, ...] | None


def prediction_of(text: str, most: int) -> Prediction:
    """The fields of an answer to `PREDICT`: of each, its last line.

    >>> prediction_of("Length: 120\\nRight: 3\\nNotions: Angles, area, angle", 8)
    Prediction(length=120, rate=0.375, notions=('angle', 'area'))
    """

    def last(name: str) -> str | None:
        found = re.findall(rf"^\W*{name}\W*:\s*(.*?)\s*$", text, flags=re.IGNORECASE | re.MULTILINE)
        return found[-1] if found else None

    length, right, named = last("length"), last("right"), last("notions")
    number = int(right) if right and re.fullmatch(r"[0-9]{1,9}", right) else None
    notions = dict.fromkeys(stem for word in (named or "").split(",") if (stem := stem_of(word)))
    return Prediction(
        int(length) if length and re.fullmatch(r"[0-9]{1,9}", length) else None,
        number / most if number is not None and number <= most else None,
        tuple(notions) if notions else None,
    )


def stem_of(notion: str) -> str:
    """A notion in lower case, without the s of a plural."""
    notion = " ".join(notion.lower().split()).strip(" .*`")
    return notion[:-1] if len(notion) > 3 and notion.endswith("s") and not notion.endswith("ss") else notion


def agreement(
    prediction: Prediction, problem: str, right: Sequence[bool], lengths: Sequence[int], texts: Sequence[str],
    base: float = 0.01, inclusive: bool = False,
) -> float:  # fmt: skip
    """The mean of three agreements of a prediction with the solutions, each from 0 to 1; 0 for a missing field.

    length: 1 if it is between those of the shortest and the longest right solution (inclusive: or one of these).
    rate: base^|predicted - actual|. notions: the share of those not in the problem that more right than wrong solutions
    contain; 0 if none is left.
    """
    scores = [0.0, 0.0, 0.0]
    those = [length for length, is_so in zip(lengths, right, strict=True) if is_so]
    if prediction.length is not None and those:
        low, high = min(those), max(those)
        within = low <= prediction.length <= high if inclusive else low < prediction.length < high
        scores[0] = float(within)
    if prediction.rate is not None and len(right):
        scores[1] = base ** abs(prediction.rate - sum(right) / len(right))
    new = [notion for notion in prediction.notions or () if notion not in problem.lower()]
    if new:
        lower = [text.lower() for text in texts]
        leads = [sum(2 * is_so - 1 for t, is_so in zip(lower, right, strict=True) if notion in t) for notion in new]
        scores[2] = sum(lead > 0 for lead in leads) / len(new)
    return sum(scores) / 3


@part
def with_predictions(
    predictions: Count | None = None,
    levels: Count = 8,
    base: float = 0.01,
    inclusive: bool = False,
    success: float = 0.5,
) -> Rollout:
    """A group of solutions, and one of the policy's predictions of them, whose reward is their `agreement`.

    predictions: their number; None: as many as solutions. levels: a predicted pass rate is a whole number up to this,
    divided by it. A solution is right if its reward is above `success`. Predictions do not see the solutions; they are
    group 1 (info["part"]), and their components of the reward are NaN.
    """
    check_number("base", base, above=0, most=1)
    is_right = succeeds(success)

    async def solutions(tools: Tools, task: Task) -> list[Episode]:
        return [one.in_part(0) for one in await scored_samples(tools, task.prompt, range(task.samples))]

    async def program(tools: Tools, task: Task) -> list[Episode]:
        problem = problem_text(tools, task)
        prompt = second_prompt(tools, task, PREDICT.format(problem=problem, most=levels))
        solved, predicted = await gather(
            solutions(tools, task), answers(tools, task, prompt, predictions or task.samples, 1)
        )
        right, texts = list(map(is_right, solved)), [tools.decode(sampled_ids(one)) for one in solved]
        lengths = [int(one.actions.sum()) for one in solved]
        found = [prediction_of(tools.decode(sampled_ids(one)), levels) for one in predicted]
        rewards = [agreement(one, problem, right, lengths, texts, base, inclusive) for one in found]
        return [*solved, *(graded(e, reward, solved[0]) for e, reward in zip(predicted, rewards, strict=True))]

    return Rollout(
        program, "with_predictions", demands=Demands(variable_size=True, max_episodes=lambda G: G + (predictions or G))
    )


def boxed(text: str) -> str | None:
    r"""What the last \boxed{...} has, if it is a word."""
    found = re.findall(r"\\boxed\{\s*(?:\\text\{)?(\w+)\}?\s*\}", text)
    return found[-1] if found else None
