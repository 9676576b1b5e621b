"""Rollouts whose completions begin with given tokens: part of a response of the data set.

Given tokens are conditioned on and masked out of the loss. They belong to the response: they count towards the limit of
its tokens, and reward functions read them.
"""

from __future__ import annotations

from asyncio import gather
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from jaxrl_llm.core.ranges import Count, Fraction, check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Demands, Rollout
from jaxrl_llm.rollouts.context import Task, Tools
from jaxrl_llm.rollouts.episode import Episode, Segment, given
from jaxrl_llm.utils.errors import InputError, shown


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


async def scored_whole(tools: Tools, episodes: Sequence[Episode]) -> list[Episode]:
    """The episodes with the rewards of all their tokens after the prompt, given ones too."""
    # Reward functions see what is marked as sampled.
    whole = [replace(episode, segments=(Segment(episode.own, True, episode.experts),)) for episode in episodes]
    found = await tools.score(whole)
    return [replace(e, reward=one.reward, rewards=one.rewards) for e, one in zip(episodes, found, strict=True)]


def responses_of(tools: Tools, task: Task, column: str) -> list[list[int]]:
    """The token ids of the row's responses: those of a text, or of each text of a list; none for an empty entry.

    Raises InputError for anything else.
    """
    entry: Any = task.row.get(column)
    texts = list(entry) if isinstance(entry, list | tuple) else [entry]
    if not all(text is None or isinstance(text, str) for text in texts):
        raise InputError(f"the column {column!r} has {shown(entry)}, but must have a text or a list of texts")
    return [tools.encode(text) for text in texts if text]


def reset_lengths(random: np.random.Generator, samples: int, length: int, share: float) -> list[int]:
    """For each sample, with probability `share` a number from 1 to length - 1, all equally likely, else 0.

    length: tokens of the response; below 2 there is nothing to begin with.
    """
    if length < 2:
        return [0] * samples
    begins = random.random(samples) < share
    return np.where(begins, random.integers(1, length, samples), 0).tolist()


@part
def reset_to_data(column: str = "response", share: float = 1.0) -> Rollout:
    """Samples that begin with the first tokens of the data set's response, as many as `reset_lengths` draws for each.

    column: a text, or a list of texts of which each sample draws one. Of a response, at most the task's limit of tokens
    counts. Rows without a response are sampled from the prompt. With `share` 0 this is `group`, scored group by group.
    The metrics rollout/prefix and rollout/prefixed are the mean number of given tokens, and the share of episodes that
    have some.
    """
    check_number("share", share, least=0, most=1)

    async def program(tools: Tools, task: Task) -> list[Episode]:
        responses, random = responses_of(tools, task, column), tools.random("reset")
        prefixes: list[list[int]] = [[]] * task.samples
        if responses:
            which = random.integers(0, len(responses), task.samples).tolist()
            chosen = [responses[i][: task.limit] for i in which]
            prefixes = [ids[: reset_lengths(random, 1, len(ids), share)[0]] for ids in chosen]
        return await continued(tools, task, prefixes)

    return Rollout(program, f"reset_to_data({column}, {share:g})", columns=(column,))


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

    return Rollout(
        program,
        f"prefixed_groups({column})",
        columns=(column,),
        demands=Demands(variable_size=True, max_episodes=lambda G: G * (1 + prefixes)),
    )
