"""Rollouts whose responses are begun by one policy and completed by another: the learner, and a guide."""

from __future__ import annotations

from asyncio import gather
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

from jaxrl_llm.core.ranges import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.rewards.workers.loading import load_function
from jaxrl_llm.rollouts.auxiliary_prompts import problem_of
from jaxrl_llm.rollouts.context import Task, Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.guidance.prefixes import continued, reset_lengths, responses_of
from jaxrl_llm.utils.errors import InputError, require_choice

BOTH_LEARN = -1.0  # info["switch"] of an episode whose sampled tokens are all the learner's

Begins = Literal["guide", "learner", "learner_first"]


async def begun_by_guide(tools: Tools, task: Task, prefixes: list[list[int]]) -> list[Episode]:
    """The learner continues prefixes of the guide's responses, which are given and masked."""
    return [one.with_info(switch=BOTH_LEARN) for one in await continued(tools, task, prefixes)]


async def begun_by_learner(
    tools: Tools, task: Task, guide: Callable[..., Any], share: float, problem: str
) -> list[Episode]:
    """The guide continues prefixes of the learner's responses, of lengths that `reset_lengths` draws.

    The guide's tokens are marked as actions, so that a critic values them, but they have no log-probability. Adds
    info["switch"], the number of the learner's tokens.
    """
    random = tools.random("switch")

    async def one(number: int, place: float, is_long: bool) -> Episode:
        own = await tools.sample(task.prompt, number=number)
        h = 1 + int(place * (own.size - 1)) if is_long and own.size >= 2 else 0
        begun = own.first(h)
        text = str(await tools.call(guide, problem, tools.decode(begun.own.token.tolist()), name=f"guide {number}"))
        rest = tools.given(text)
        rest = rest._replace(tokens=rest.tokens.first(task.limit - h), sampled=True)
        cut = len(tools.encode(text)) > task.limit - h
        return replace(begun + rest, ended=not cut, truncated=cut).with_info(switch=float(h), prefix=0.0)

    places, longs = random.random(task.samples), random.random(task.samples) < share
    numbered = enumerate(zip(places.tolist(), longs.tolist(), strict=True))
    return await tools.score(await gather(*(one(number, *drawn) for number, drawn in numbered)))


@part
def two_policies(
    begins: Begins = "guide", column: str = "guide", guide: str | None = None, share: float = 0.8, steps: int = 20
) -> Rollout:
    """Responses of which one policy writes the first h tokens, and the other the rest.

    h is drawn by `reset_lengths` from the length of a full response of the first, with probability `share`; otherwise
    h = 0. begins: "guide"; "learner"; "learner_first", the learner in the first `steps` training steps, then the guide.

    column: the guide's responses, a text or a list of texts, of which each sample that the guide begins draws one; a
    row without any is sampled from the prompt. guide: FILE.py:FUNCTION of (problem, response so far) that returns the
    rest as a text, a call of the guide; only needed where the learner begins. Adds info "switch", the number of the
    learner's tokens before the guide's, or -1 where the guide begins, and "prefix", the number of given tokens. Raises
    InputError for a learner that begins without a guide, and for a guide that cannot be loaded.
    """
    require_choice("begins", begins, ("guide", "learner", "learner_first"))
    check_number("share", share, least=0, most=1)
    check_number("steps", steps, least=0, whole=True)
    if begins != "guide" and guide is None:
        raise InputError(f"begins is {begins!r}, whose responses a guide completes: give guide, FILE.py:FUNCTION")
    function = None if guide is None else load_function(guide, "the guide").function

    async def program(tools: Tools, task: Task) -> list[Episode]:
        if begins == "learner" or (begins == "learner_first" and tools.first_step < steps):
            assert function is not None
            return await begun_by_learner(tools, task, function, share, problem_of(tools, task))
        responses, random = [ids[: task.limit] for ids in responses_of(tools, task, column)], tools.random("guide")
        prefixes: list[list[int]] = [[] for _ in range(task.samples)]
        if responses:
            chosen = [responses[i] for i in random.integers(0, len(responses), task.samples)]
            prefixes = [ids[: reset_lengths(random, 1, len(ids), share)[0]] for ids in chosen]
        return await begun_by_guide(tools, task, prefixes)

    return Rollout(program, f"two_policies({begins})", columns=() if begins == "learner" else (column,))
