"""Rollouts that ask a second question about a problem, whose answers are a group of their own in the same step.

It may be made of the answers to the first (`recycled`). A second prompt is the row's prompt with another text around
the problem. It has no system prompt of the run.
"""

import logging
import math
import re
from asyncio import gather
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from jaxrl_llm.core.arguments.ranges import Count, Fraction, NonNegativeInt, Share
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Demands, Rollout, Task
from jaxrl_llm.data.chat.encode import encode_prompt, is_conversation, prompt_text
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, sampled_ids
from jaxrl_llm.rollouts.guidance.hints import problem_of
from jaxrl_llm.rollouts.guidance.repair import succeeds
from jaxrl_llm.rollouts.programs import program_part, samples, scored_samples

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


async def _answers(tools: Tools, task: Task, prompt: Sequence[int], count: int, part: int) -> list[Episode]:
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


def with_own_reward(episode: Episode, reward: float, like: Episode) -> Episode:
    """The episode with a reward that the program computed. The run's components, those of `like`, are NaN."""
    return episode.scored(reward, dict.fromkeys(like.rewards, math.nan))


class Question(NamedTuple):
    """A question about scored responses, and the label of its right answer; None: the row's own answer."""

    text: str
    label: str | None = None


Questions = Callable[[Tools, Task, list[Episode]], Awaitable[dict[int, Question]]]


@program_part("also_ask", demands=lambda most, **_: Demands(variable_size=True, max_episodes=lambda G: (1 + most) * G))
async def also_ask(tools: Tools, task: Task, questions: Questions, most: NonNegativeInt = 1) -> list[Episode]:
    """A scored group of samples, and a group of `task.samples` answers to each of the questions about it.

    questions: an async function of (tools, task, group) that returns at most so many, by the number of their group
    (info["part"]), from 1 on; samples that it draws have numbers from (1 + most) `task.samples` on. An answer's reward
    is 1 if its last \\boxed{...} is the label, else 0, and its components of the reward are NaN; without a label it is
    scored by the run's rewards, as an answer to the row.
    """
    group = [one.in_part(0) for one in await scored_samples(tools, task.prompt, range(task.samples))]
    asked = await questions(tools, task, group)
    prompts = {part: second_prompt(tools, task, asked[part].text) for part in sorted(asked)}
    found = await gather(*(_answers(tools, task, ids, task.samples, part) for part, ids in prompts.items()))
    more = [episode for some in found for episode in some]
    unlabelled = [one for one in more if asked[one.part].label is None]
    scored = iter(await tools.score(unlabelled) if unlabelled else ())

    def with_reward(one: Episode) -> Episode:
        if (label := asked[one.part].label) is not None:
            return with_own_reward(one, float(boxed(tools.decode(sampled_ids(one))) == label), group[0])
        like = next(scored)
        return replace(one, reward=like.reward, rewards=like.rewards)

    return [*group, *map(with_reward, more)]


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


@program_part(
    "with_predictions",
    demands=lambda predictions, **_: Demands(variable_size=True, max_episodes=lambda G: G + (predictions or G)),
)
async def with_predictions(
    tools: Tools,
    task: Task,
    predictions: Count | None = None,
    levels: Count = 8,
    base: Share = 0.01,
    inclusive: bool = False,
    success: float = 0.5,
) -> list[Episode]:
    """A group of solutions, and one of the policy's predictions of them, whose reward is their `agreement`.

    predictions: their number; None: as many as solutions. levels: a predicted pass rate is a whole number up to this,
    divided by it. A solution is right if its reward is above `success`. Predictions do not see the solutions; they are
    group 1 (info["part"]), and their components of the reward are NaN.
    """
    is_right = succeeds(success)
    problem = problem_text(tools, task)
    prompt = second_prompt(tools, task, PREDICT.format(problem=problem, most=levels))
    solved, predicted = await gather(
        scored_samples(tools, task.prompt, range(task.samples)),
        _answers(tools, task, prompt, predictions or task.samples, 1),
    )
    solved = [one.in_part(0) for one in solved]
    right, texts = list(map(is_right, solved)), [tools.decode(sampled_ids(one)) for one in solved]
    lengths = [int(one.actions.sum()) for one in solved]
    found = [prediction_of(tools.decode(sampled_ids(one)), levels) for one in predicted]
    rewards = [agreement(one, problem, right, lengths, texts, base, inclusive) for one in found]
    return [*solved, *(with_own_reward(e, reward, solved[0]) for e, reward in zip(predicted, rewards, strict=True))]


def boxed(text: str) -> str | None:
    r"""What the last \boxed{...} has, if it is a word."""
    found = re.findall(r"\\boxed\{\s*(?:\\text\{)?(\w+)\}?\s*\}", text)
    return found[-1] if found else None


def stated_answer(text: str) -> str | None:
    r"""The answer that a response states last: \boxed{...}, else <answer>...</answer>, else its last number; or None.

    >>> stated_answer(r"so \boxed{\frac{1}{2}}, that is 0.5"), stated_answer("it is 4, or 5."), stated_answer("no")
    ('\\frac{1}{2}', '5', None)
    """
    if (start := text.rfind(r"\boxed{")) >= 0:
        depth, first = 0, start + len(r"\boxed{")
        for place in range(first - 1, len(text)):
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[first:place].strip() or None
    for pattern in (r"<answer>\s*(.*?)\s*</answer>", r"(-?[0-9][0-9,]*(?:\.[0-9]+)?(?:/[0-9]+)?)"):
        if found := re.findall(pattern, text, flags=re.DOTALL):
            return found[-1] or None
    return None


def recycled_items(
    random: Any, problem: str, texts: Sequence[str], right: Sequence[bool], pointwise: float = 0.3, whole: float = 0.5
) -> tuple[Question | None, Question | None]:
    """A question that judges scored responses, and one that corrects a wrong response; None where there is none.

    All right: whether the first stated answer is right (yes). All wrong: whether a random one is (no). Mixed: with
    probability `pointwise` whether a random one is, right or wrong alike, else which of a right and a wrong one is
    right (A or B). Any wrong: to solve the problem again after a wrong response, of which `whole` of the questions show
    the text, the others the stated answer. Responses without a stated answer are not judged.

    random: a NumPy generator.
    """

    def pick(options: Sequence[Any]) -> Any:
        return options[int(random.integers(len(options)))]

    stated = [stated_answer(text) for text in texts]
    good = [a for a, is_so in zip(stated, right, strict=True) if is_so and a is not None]
    bad = [a for a, is_so in zip(stated, right, strict=True) if not is_so and a is not None]
    judge: Question | None = None
    if good and bad and random.random() >= pointwise:
        first = random.random() < 0.5
        pair = (pick(good), pick(bad)) if first else (pick(bad), pick(good))
        text = pick(COMPARE).format(problem=problem, first=pair[0], second=pair[1])
        judge = Question(text, "A" if first else "B")
    elif good or bad:
        is_good = bool(good) and (not bad or random.random() < 0.5)
        answer = (good[0] if all(right) else pick(good)) if is_good else pick(bad)
        judge = Question(pick(JUDGE).format(problem=problem, answer=answer), "yes" if is_good else "no")
    wrong = [text for text, is_so in zip(texts, right, strict=True) if not is_so]
    attempt = None
    if wrong and (random.random() < whole or not bad):
        attempt = pick(wrong)
    elif bad:
        attempt = pick(bad)
    reflect = None if attempt is None else Question(pick(REFLECT).format(problem=problem, attempt=attempt), None)
    return judge, reflect


@part
def recycled(share: Fraction = 0.5, pointwise: Fraction = 0.3, whole: Fraction = 0.5, success: float = 0.5) -> Rollout:
    """A scored group, and groups of questions about it that are made by `recycled_items`.

    share: the probability with which a judging question is asked, and likewise a correcting one; 0: this is `group`.
    Judgements are group 1 and corrections group 2, see `also_ask`. A response is right with a reward above `success`.
    """
    is_right = succeeds(success)

    async def questions(tools: Tools, task: Task, group: list[Episode]) -> dict[int, Question]:
        random, texts = tools.random("recycled"), [tools.decode(sampled_ids(one)) for one in group]
        kept, right = random.random(2) < share, list(map(is_right, group))
        items = recycled_items(random, problem_text(tools, task), texts, right, pointwise, whole)
        return {part: item for part, item in enumerate(items, start=1) if item is not None and kept[part - 1]}

    return replace(also_ask(questions, 2 if share else 0), name="recycled")


JUDGE = (
    "{problem}\n\nA proposed answer: {answer}\n\nIs it right? Think, then write \\boxed{{yes}} or \\boxed{{no}}.",
    "Judge the answer {answer} to this problem:\n\n{problem}\n\nEnd with \\boxed{{yes}} if it is right, \\boxed{{no}} "
    "if it is wrong.",
)
COMPARE = (
    "{problem}\n\nAnswer A: {first}\nAnswer B: {second}\n\nWhich one is right? Think, then write \\boxed{{A}} or "
    "\\boxed{{B}}.",
    "One of two answers to this problem is right:\n\n{problem}\n\nA: {first}\nB: {second}\n\nEnd with \\boxed{{A}} or "
    "\\boxed{{B}}.",
)
REFLECT = (
    "{problem}\n\nA wrong attempt:\n{attempt}\n\nFind the mistake, then solve the problem.",
    "This attempt at a problem is wrong.\n\nProblem: {problem}\n\nAttempt: {attempt}\n\nSolve the problem again.",
)
