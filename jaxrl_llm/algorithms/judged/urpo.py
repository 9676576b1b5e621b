import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Count, NonNegative, NonNegativeInt, Ours
from jaxrl_llm.rewards.judges.questions import stated
from jaxrl_llm.rollouts.auxiliary_prompts import problem_text, second_prompt
from jaxrl_llm.rollouts.judges.answerers import Answerer, policy
from jaxrl_llm.rollouts.judges.comparisons import counts, sampled_texts
from jaxrl_llm.rollouts.judges.judged import text_in
from jaxrl_llm.rollouts.programs import Episode, Task, Tools, program_part, samples, scored_samples
from jaxrl_llm.utils.errors import InputError, shown

LOW, HIGH = 1.0, 10.0  # of a referee's scores
SCORE = """Score several responses to a prompt.

Prompt:
{problem}

{responses}

Explain in a few sentences what is good and bad about each. Then write the scores of all {count} responses, in their order, in the last line, between [[ and ]] and with commas between them. A score is a number from 1 to 10, the best."""  # noqa: E501


@method(paper="arXiv 2507.17515", test="test_judged_methods.py::test_urpo_ranks_and_referees")
def urpo(
    calls: Ours[Count] = 4,
    open_from: Ours[NonNegativeInt] = 0,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.04,
) -> Algorithm:
    """Unified Reward and Policy Optimization (URPO).

    One policy plays and referees in one loop. Of three kinds of rows, which a batch mixes, each makes a group with one
    reward a sample, and all groups have the loss of `grpo` (clip_low, clip_high, kl_coefficient):

        verifiable  a row with an `answer`: the run's rewards
        ranking     a row with `completions` and `labels`, or with `chosen` and `rejected`: a sample scores the N
                    responses, in random order, and its reward is the agreement with their labels,
                    Kendall's tau = 2 / (N (N - 1)) sum_{j<k} sign(s_j - s_k) sign(y_j - y_k), and -1 without N scores
        open        any other row: the same weights score the samples of the group, shown together, `calls` times in
                    random orders, and a sample's reward is the mean of its scores over the answers that have all

    What the referee says of open rows is not trained on. open_from: the first step in which open rows are scored,
    since a referee that cannot rank yet gives noise. Where a reward such as number_match reads answers, those of rows
    without one are "". The words of the questions, the numbers and how open rows begin are ours.
    """
    return replace(grpo(clip_low, clip_high, kl_coefficient), rollout=player_and_referee(calls, open_from))


@program_part("player and referee")
async def player_and_referee(
    tools: Tools, task: Task, calls: Count = 4, open_from: NonNegativeInt = 0, by: Answerer | None = None
) -> list[Episode]:
    """A group of each row: scored samples, scored rankings of the row's responses, or samples that a referee scores.

    See `urpo`. by: the referee, default the policy. Metrics, of the first sample's group: "judge/agreement", the mean
    reward of a group of rankings, and of open rows "judge/asked"; of both "judge/unparsed".
    """

    async def ranked(texts: Sequence[str], labels: Sequence[float]) -> list[Episode]:
        order = tools.random("ranking").permutation(len(texts))
        prompt = second_prompt(tools, task, question(problem_text(tools, task), [texts[place] for place in order]))
        if not tools.fits(prompt):
            raise InputError(f"prompt {task.prompt_id}: its responses fill the model's context: leave the row out")
        found = await samples(tools, prompt, range(task.samples))
        said = [scores_in(text, len(texts)) for text in sampled_texts(tools, found)]
        wanted = [labels[place] for place in order]
        rewards = [-1.0 if scores is None else rank_agreement(scores, wanted) for scores in said]
        notes = {
            "judge/agreement": float(np.mean(rewards)),
            "judge/unparsed": sum(scores is None for scores in said) / len(said),
        }
        return [one.scored(reward).with_info(**notes) for one, reward in zip(found, rewards, strict=True)]

    if (listed := responses_of(task)) is not None:
        return await ranked(*listed)
    if task.row.get("answer") not in (None, ""):
        return await scored_samples(tools, task.prompt, range(task.samples))
    found = await samples(tools, task.prompt, range(task.samples))
    if tools.first_step < open_from:
        return [one.scored(math.nan) for one in found]
    texts = sampled_texts(tools, found)
    problem = problem_text(tools, task)
    random = tools.random("referee")
    orders = [random.permutation(len(texts)) for _ in range(calls)]
    referee = policy() if by is None else by
    said = await referee.answers(
        tools, task, [question(problem, [texts[place] for place in order]) for order in orders], 1, 0
    )
    known = [
        np.asarray(scores)[np.argsort(order)]
        for order, answers in zip(orders, said, strict=True)
        for text in answers
        if (scores := scores_in(text, len(texts))) is not None
    ]
    rewards = np.mean(known, axis=0) if known else np.full(len(texts), np.nan)
    notes = counts(calls, calls - len(known))
    return [one.scored(reward).with_info(**notes) for one, reward in zip(found, rewards, strict=True)]


def question(problem: str, texts: Sequence[str]) -> str:
    """The question for scores of several responses."""
    listed = "\n\n".join(f"Response {number}:\n{text}" for number, text in enumerate(texts, start=1))
    return SCORE.format(problem=problem, responses=listed, count=len(texts))


def responses_of(task: Task) -> tuple[list[str], list[float]] | None:
    """The responses of a row and their labels; None for a row without. InputError for what cannot be ranked."""
    row = task.row
    if row.get("chosen") is not None and row.get("rejected") is not None:
        return [text_in(task, "chosen"), text_in(task, "rejected")], [1.0, 0.0]
    said, labels = row.get("completions"), row.get("labels")
    if said is None or labels is None:
        return None
    if not (isinstance(said, list | tuple) and isinstance(labels, list | tuple) and len(said) == len(labels) > 1):
        raise InputError(f"prompt {task.prompt_id} has no two lists of one length: {shown(said)}, {shown(labels)}")
    if wrong := [one for one in labels if not isinstance(one, bool | int | float)]:
        raise InputError(f"prompt {task.prompt_id} has the label {shown(wrong[0])}, but it must be a number")
    each = [replace(task, row={"completion": one}) for one in said]
    return [text_in(one, "completion") for one in each], [float(label) for label in labels]


def scores_in(text: str, count: int) -> list[float] | None:
    """The scores that an answer states last, 1 to 10 each; None unless it states as many as `count`.

    >>> scores_in("The second is short. [[3, 7.5]]", 2), scores_in("[[3, 11]]", 2), scores_in("[[3]]", 2)
    ([3.0, 7.5], None, None)
    """
    try:
        scores = [float(part) for part in (stated(text) or "").split(",")]
    except ValueError:
        return None
    return scores if len(scores) == count and all(LOW <= score <= HIGH for score in scores) else None


def rank_agreement(scores: Sequence[float], labels: Sequence[float]) -> float:
    """Kendall's tau, -1 to 1: concordant minus discordant pairs, by all pairs; one that is tied in either counts 0.

    >>> round(rank_agreement([9, 7, 3, 5], [4, 3, 2, 1]), 6), rank_agreement([5, 5], [1, 0])
    (0.666667, 0.0)
    """
    s, y = np.asarray(scores, np.float64), np.asarray(labels, np.float64)
    agree = np.sign(s[:, None] - s) * np.sign(y[:, None] - y)
    return float(agree.sum() / (len(s) * (len(s) - 1)))
