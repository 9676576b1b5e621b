"""Rollouts that sample a step in rounds: how many samples a prompt gets next depends on those of all prompts so far."""

import heapq
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from scipy.special import stdtrit

from jaxrl_llm.core.arguments.ranges import Count, NonNegative, OpenFraction
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Demands, Rollout, Task
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, known_scores
from jaxrl_llm.rollouts.guidance.hints import texts_of
from jaxrl_llm.rollouts.guidance.repair import Succeeds, marked_episodes
from jaxrl_llm.rollouts.programs import scored_samples
from jaxrl_llm.rollouts.runtime.sample_numbers import SampleNumbers
from jaxrl_llm.utils.errors import InputError, shown

# (rewards of the samples of each prompt so far, without those that have none; samples to divide) -> samples of each
Divide = Callable[[Sequence[np.ndarray], int], Sequence[int]]


def confidence_width(deviation: float, count: int, level: float = 0.05) -> float:
    """h(n) = t_(1 - level/2, n - 1) s / sqrt(n): half the confidence interval of a mean of n samples, n at least 2.

    t is a quantile of Student's distribution with n - 1 degrees of freedom, deviation the unbiased s of the samples.
    """
    return float(stdtrit(count - 1, 1 - level / 2)) * deviation / float(np.sqrt(count))


def exploration_priority(
    deviation: float, count: int, spent: int, exploration: float = 0.1, level: float = 0.05
) -> float:
    """What one more sample of a prompt is worth (XRPO, 2510.06672): h(n) - h(n + 1) + exploration sqrt(log(1 + T) / n).

    How much it would narrow the confidence interval of the mean reward of its n = `count` samples, whose unbiased
    `deviation` is taken to stay, and an upper confidence bound with T = `spent` samples of all prompts so far. The
    width of less than two samples is unknown; then only the bound counts.

    >>> round(exploration_priority(0.577350, 4, 8), 6)
    0.275933
    """
    bound = exploration * float(np.sqrt(np.log1p(spent) / max(count, 1)))
    if count < 2:
        return bound
    return confidence_width(deviation, count, level) - confidence_width(deviation, count + 1, level) + bound


@part
def by_confidence(exploration: NonNegative = 0.1, level: OpenFraction = 0.05) -> Divide:
    """A rule of `in_rounds`: the samples go, one after the other, to the prompt of the largest `exploration_priority`.

    A sample that is assigned counts at once, so that the next may go to another prompt; the deviations and T are those
    before the round. Of equal priorities the prompt with fewer samples comes first, then the earlier one. exploration:
    at least 0. level: of the intervals, within 0 and 1.
    """

    def divide(rewards: Sequence[np.ndarray], budget: int) -> list[int]:
        spent = sum(map(len, rewards))
        deviation = [float(np.std(one, ddof=1)) if len(one) > 1 else 0.0 for one in rewards]
        out = [0] * len(rewards)

        def entry(place: int) -> tuple[float, int, int]:
            count = len(rewards[place]) + out[place]
            return -exploration_priority(deviation[place], count, spent, exploration, level), count, place

        waiting = [entry(place) for place in range(len(rewards))]
        heapq.heapify(waiting)
        for _ in range(budget):
            place = waiting[0][2]
            out[place] += 1
            heapq.heapreplace(waiting, entry(place))
        return out

    return divide


def _counts(divide: Divide, rounds: int, values: Sequence[Any]) -> list[int]:
    """The samples of each prompt in the next of so many rounds, from what the programs bring to its meeting."""
    budget = sum(samples - drawn for _, samples, drawn, _ in values) // rounds
    counts = [int(count) for count in divide([np.asarray(one, np.float64) for *_, one in values], budget)]
    if len(counts) != len(values) or min(counts) < 0 or sum(counts) != budget:
        raise InputError(
            f"in_rounds: divide gave {shown(counts)}, but must give {len(values)} prompts {budget} samples"
        )
    return counts


@part
def in_rounds(
    divide: Divide,
    first: Count | None = None,
    rounds: Count = 2,
    *,
    solved: Succeeds | None = None,
    column: str = "solved_examples",
    text: str = "{}\n\n",
) -> Rollout:
    """Sample `first` of each prompt, then divide the rest of the step's samples among the prompts in so many rounds.

    divide: such as `by_confidence`; it is called with what all prompts of the step have before a round, in which an
    equal part of the samples that are left is divided. The samples of a step are as many as without rounds; groups
    differ in size. first: None is half of a group, and at least 2.

    solved: None, or a function of a scored episode, see `repair.succeeds`. A prompt without a success so far gets the
    samples of the next round with the texts of the column in front, joined, each written as `text`, where its row has
    any: a curriculum may give it, such as xrpo's `solved_examples`. They train under the plain prompt.

    Provides info["guided"], 1 for samples with examples, info["off_prompt"] (`Episode.trained_under`), and
    info["unhinted"], 1 in a group that would have had examples, but whose row has none.
    """

    async def program(tools: Tools, task: Task) -> list[Episode]:
        begun = min(first or max(2, task.samples // 2), task.samples)
        # Numbers of its samples, which no other program for the same prompt has, whoever gets how many.
        numbers, found, unhinted = SampleNumbers(own=task.samples, extra=task.samples), list[Episode](), False

        async def sample(count: int, prompt: Sequence[int], guided: float = 0.0) -> None:
            some = range(len(found), len(found) + count)
            drawn = await scored_samples(tools, prompt, map(numbers.of, some))
            found.extend(one.with_info(guided=guided) for one in drawn)

        await sample(begun, task.prompt)

        for number in range(rounds):
            own: Any = [task.prompt_id, task.samples, len(found), known_scores(found).tolist()]
            counts = partial(_counts, divide, rounds - number)
            met = await tools.meet(own, name=f"round {number}", decide=counts)
            if not number:
                total = sum(samples for _, samples, _, _ in met.values)
                before = sum(prompt == task.prompt_id for prompt, _, _, _ in met.values[: met.place])
                numbers = SampleNumbers(own=task.samples, extra=total * (1 + before))
            more = met.decision[met.place]
            helped = None
            if more and solved is not None and not any(map(solved, found)):
                helped = _with_examples(tools, task, column, text)
                unhinted |= helped is None
            await sample(more, helped or task.prompt, float(helped is not None))
        return marked_episodes([one.trained_under(task.prompt) for one in found], unhinted)

    provides = frozenset({"guided"}) if solved is not None else frozenset[str]()
    name = f"in_rounds({'half' if first is None else first}, {rounds})"
    return Rollout(
        program, name, provides, demands=Demands(min_samples=(first or 2) + 1, variable_size=True, meets=True)
    )


def _with_examples(tools: Tools, task: Task, column: str, text: str) -> tuple[int, ...] | None:
    """The prompt with the row's examples in front; None if it has none, or no room for them."""
    examples = texts_of(task.row.get(column), column)
    prompt = tools.prompt_with("".join(map(text.format, examples)), first=True) if examples else ()
    return prompt if prompt and tools.fits(prompt) else None
