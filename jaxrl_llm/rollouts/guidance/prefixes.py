"""Rollouts whose completions begin with given tokens: part of a response of the data set, of a solution, or a guide's.

Given tokens are conditioned on and masked out of the loss, unless the rollout says otherwise. They belong to the
response: they count towards the limit of its tokens, and reward functions read them.
"""

import math
from asyncio import gather
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from jaxrl_llm.core.arguments.ranges import Count, Fraction, NonNegative, NonNegativeInt
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Demands, Rollout, Task
from jaxrl_llm.rewards.workers.loading import load_function
from jaxrl_llm.rollouts.auxiliary_prompts import problem_text
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode, given, known_scores
from jaxrl_llm.rollouts.guidance.hints import texts_of
from jaxrl_llm.rollouts.guidance.repair import repair
from jaxrl_llm.rollouts.programs import program_part, scored_whole
from jaxrl_llm.utils.errors import InputError, require_choice

REFERENCE = "reference"  # as a guide
BOTH_LEARN = -1.0  # info["switch"] of an episode whose sampled tokens are all the learner's


async def continued(tools: Tools, task: Task, prefixes: Sequence[Sequence[int]], first: int = 0) -> list[Episode]:
    """A scored completion after each of the prefixes, lists of token ids shorter than the task's limit.

    first: sample number of the first. Rewards are those of prefix and continuation together. Adds info["prefix"], the
    number of given tokens.
    """

    async def one(number: int, ids: Sequence[int]) -> Episode:
        begun = Episode(task.prompt, task.prompt_id, number)
        begun = begun + given(ids) if len(ids) else begun
        episode = await tools.sample(begun, number=number, limit=task.limit - len(ids))
        return episode.with_info(prefix=float(len(ids)))

    return await scored_whole(tools, await gather(*(one(first + i, ids) for i, ids in enumerate(prefixes))))


def responses_of(tools: Tools, task: Task, column: str) -> list[list[int]]:
    """The token ids of the row's responses, see `texts_of`."""
    return [tools.encode(text) for text in texts_of(task.row.get(column), column)]


def reset_lengths(random: np.random.Generator, samples: int, length: int, share: float) -> list[int]:
    """For each sample, with probability `share` a number from 1 to length - 1, all equally likely, else 0.

    length: tokens of the response; below 2 there is nothing to begin with.
    """
    if length < 2:
        return [0] * samples
    begins = random.random(samples) < share
    return np.where(begins, random.integers(1, length, samples), 0).tolist()


def random_prefixes(tools: Tools, task: Task, column: str, share: float, name: str) -> list[list[int]]:
    """For each sample, the first tokens of one of the row's responses, as many as `reset_lengths` draws.

    Of a response, at most the task's limit of tokens counts. name: of the random numbers, `Tools.random`.
    """
    responses, random = responses_of(tools, task, column), tools.random(name)
    if not responses:
        return [[]] * task.samples
    chosen = [responses[i][: task.limit] for i in random.integers(0, len(responses), task.samples)]
    return [ids[: reset_lengths(random, 1, len(ids), share)[0]] for ids in chosen]


@program_part("reset_to_data({column}, {share:g})", columns=["{column}"])
async def reset_to_data(tools: Tools, task: Task, column: str = "response", share: Fraction = 1.0) -> list[Episode]:
    """Samples that begin with the first tokens of the data set's response, as many as `reset_lengths` draws for each.

    column: a text, or a list of texts of which each sample draws one. Of a response, at most the task's limit of tokens
    counts. Rows without a response are sampled from the prompt. With `share` 0 this is `group`, scored group by group.
    The metrics rollout/prefix and rollout/prefixed are the mean number of given tokens and the share of rows with some.
    """
    return await continued(tools, task, random_prefixes(tools, task, column, share, "reset"))


def prefix_length(random: np.random.Generator, length: int, limit: int, low: float, high: float) -> int:
    """A share of the length, uniform from low to high, in whole tokens: at least 1, and below length and limit.

    0 for a trace of a single token, or a limit of one.
    """
    least = min(length, limit) - 1
    return min(max(int(random.uniform(low, high) * length), 1), least) if least >= 1 else 0


@part
def prefixed_groups(column: str = "trace", low: Fraction = 0.4, high: Fraction = 0.8, prefixes: Count = 1) -> Rollout:
    """A group of samples of the prompt, and where a right trace is stored, `prefixes` groups that continue it.

    column: the stored traces, a text or a list of texts; empty where the prompt needs no help. Each of the further
    groups draws a trace and the length of its prefix, `prefix_length`, which its `task.samples` samples share, so that
    its baseline is of one context. They are groups of their own (info["part"] 1, 2 ...). Without traces this is
    `group`.
    """
    if low > high:
        raise InputError(f"prefixes are of {low:g} to {high:g} of a trace: give low, then high")

    async def program(tools: Tools, task: Task) -> list[Episode]:
        traces, n = responses_of(tools, task, column), task.samples
        contexts: list[list[int]] = [[]]
        for number in range(1, prefixes + 1 if traces else 1):
            random = tools.random(f"prefix {number}")
            ids = traces[int(random.integers(len(traces)))]
            if (length := prefix_length(random, len(ids), task.limit, low, high)) > 0:
                contexts.append(ids[:length])
        found = await gather(*(continued(tools, task, [ids] * n, i * n) for i, ids in enumerate(contexts)))
        return [episode.in_part(number) for number, some in enumerate(found) for episode in some]

    demands = Demands(variable_size=True, max_episodes=lambda G: G * (1 + prefixes))
    return Rollout(program, f"prefixed_groups({column})", columns=(column,), demands=demands)


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
    column: str = "solution", hinted: Count = 4, low: Fraction = 0.1, high: Fraction = 0.9, noise: NonNegative = 0.0
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
    if low > high:
        raise InputError(f"hints are of {low:g} to {high:g} of a solution: give low, then high")

    async def lengthen(tools: Tools, task: Task, plain: list[Episode]) -> list[Episode] | None:
        if not (solutions := responses_of(tools, task, column)):
            return None
        ids, random = solutions[0], tools.random("hint")
        ratio = hint_ratio(failure_rate(plain), low, high, noise * float(random.normal()))
        length = min(math.floor(ratio * len(ids) + 1e-9), task.limit - 1)  # 0.7 * 10 may be 6.999...
        helped = await continued(tools, task, [ids[:length]] * hinted, task.samples) if length >= 1 else []
        return [*plain, *(acted(e).with_info(guided=1.0, hint_tokens=float(length)) for e in helped)]

    return replace(
        repair((lambda found: failure_rate(found) > 0, lengthen), prefix=0.0, hint_tokens=0.0),
        name=f"hinted_by_failures({column})",
        provides=frozenset({"hint_tokens"}),
        columns=(column,),
        demands=Demands(variable_size=True),
    )


def acted(episode: Episode) -> Episode:
    """The episode whose given tokens are actions, too."""
    return replace(episode, segments=tuple(segment._replace(sampled=True) for segment in episode.segments))


def guide_begins(often: float, seed: int, step: int) -> bool:
    """Whether the guide begins all responses of a training step: true with probability `often`, for each step anew.

    A function of seed and step alone, so that all groups of a step, and a run that is resumed, draw the same.
    """
    return bool(np.random.default_rng([seed, step]).random() < often)


@part
def two_policies(
    begins: Literal["guide", "learner", "learner_first", "either"] = "guide", column: str = "guide",
    guide: str | None = None, share: Fraction = 0.8, steps: NonNegativeInt = 20, often: Fraction = 0.8,
    seed: NonNegativeInt = 0,
) -> Rollout:  # fmt: skip
    """Responses of which one policy writes the first h tokens, and the other the rest.

    h is drawn by `reset_lengths` from the length of a full response of the first, with probability `share`; otherwise
    h = 0. begins: "guide"; "learner"; "learner_first", the learner in the first `steps` training steps, then the guide;
    "either", in each training step the guide with probability `often`, else the learner, as `guide_begins` draws.

    column: the guide's responses, a text or a list of texts, of which each sample that the guide begins draws one; a
    row without any is sampled from the prompt. guide: FILE.py:FUNCTION of (problem, response so far) that returns the
    rest as a text, a call of the guide; only needed where the learner begins. "reference": the guide is the reference
    policy of the run, which draws what it begins and what it completes; no column is read. The rest is marked as
    actions, so that a critic values it, but has no log-probabilities. Adds info "switch", the number of the learner's
    tokens before the guide's, or -1 where the guide begins, and "prefix", the number of given tokens. Raises InputError
    for a learner that begins without a guide, and for a guide that cannot be loaded.
    """
    require_choice("begins", begins, ("guide", "learner", "learner_first", "either"))
    if begins != "guide" and guide is None:
        raise InputError(
            f"begins is {begins!r}, whose responses a guide completes: give guide, FILE.py:FUNCTION or reference"
        )
    own_guide = guide == REFERENCE
    function = None if guide is None or own_guide else load_function(guide, "the guide").function

    async def completed(tools: Tools, task: Task, number: int, place: float, is_long: bool) -> Episode:
        """A response that the learner begins."""
        own = await tools.sample(task.prompt, number=number)
        h = 1 + int(place * (own.size - 1)) if is_long and own.size >= 2 else 0
        begun = own.first(h)
        if own_guide:
            longer = await by_reference(tools, task, begun, number, task.limit - h)
            whole = acted(begun + given(longer.own.token[h:].tolist()))
            return replace(whole, ended=longer.ended, truncated=longer.truncated).with_info(switch=float(h), prefix=0.0)
        assert function is not None
        so_far = tools.decode(begun.own.token.tolist())
        text = str(await tools.call(function, problem_text(tools, task), so_far, name=f"guide {number}"))
        rest = tools.given(text)
        rest = rest._replace(tokens=rest.tokens.first(task.limit - h), sampled=True)
        cut = len(tools.encode(text)) > task.limit - h
        return replace(begun + rest, ended=not cut, truncated=cut).with_info(switch=float(h), prefix=0.0)

    async def program(tools: Tools, task: Task) -> list[Episode]:
        first = begins == "learner_first" and tools.first_step < steps
        drawn_first = begins == "either" and not guide_begins(often, seed, tools.first_step)
        if begins == "learner" or first or drawn_first:
            random, numbers = tools.random("switch"), range(task.samples)
            places, longs = random.random(task.samples).tolist(), (random.random(task.samples) < share).tolist()
            responses = (completed(tools, task, i, places[i], longs[i]) for i in numbers)
            return await tools.score(await gather(*responses))
        if own_guide:
            empty, numbers = Episode(task.prompt, task.prompt_id), range(task.samples)
            drawn = await gather(*(by_reference(tools, task, empty, number, task.limit) for number in numbers))
            random = tools.random("guide")
            lengths = (reset_lengths(random, 1, one.size, share)[0] for one in drawn)
            prefixes = [one.own.token[:h].tolist() for one, h in zip(drawn, lengths, strict=True)]
        else:
            prefixes = random_prefixes(tools, task, column, share, "guide")
        begun = await continued(tools, task, prefixes)
        return [episode.with_info(switch=BOTH_LEARN) for episode in begun]

    columns = () if begins == "learner" or own_guide else (column,)
    return Rollout(program, f"two_policies({begins})", columns=columns, demands=Demands(reference=own_guide))


async def by_reference(tools: Tools, task: Task, context: Episode, number: int, limit: int) -> Episode:
    """What the reference policy makes of a context, at most `limit` tokens more, beside the group's own samples."""
    return await tools.sample(context, number=task.samples + number, limit=limit, reference=True)
