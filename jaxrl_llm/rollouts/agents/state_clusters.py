"""Turns of a group whose states have similar texts begin in one state."""

from __future__ import annotations

from asyncio import gather
from collections.abc import Iterable
from dataclasses import replace
from difflib import SequenceMatcher

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.rollouts.agents.path import AgentSettings, converse
from jaxrl_llm.rollouts.agents.program import graded, with_episodes
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.program_host import Task
from jaxrl_llm.rollouts.programs import group


def are_similar(one: str, other: str, least: float) -> bool:
    """Whether 2 (characters in common blocks) / (characters of both), as difflib has it, is at least `least`."""
    matcher = SequenceMatcher(None, one, other, autojunk=False)
    bounds = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)  # the first two are cheap upper bounds
    return all(ratio() >= least for ratio in bounds)


def joined(states: Iterable[str], least: float) -> dict[str, str]:
    """The state that stands for each: the first one before it that is similar to it, else itself.

    >>> joined(["You are in room 12.", "You are in room 13.", "You win."], 0.9)
    {'You are in room 12.': 'You are in room 12.', 'You are in room 13.': 'You are in room 12.', 'You win.': 'You win.'}
    """
    found = dict[str, str]()
    firsts = list[str]()
    for state in dict.fromkeys(states):
        found[state] = next((first for first in firsts if are_similar(first, state, least)), state)
        if found[state] == state:
            firsts.append(state)
    return found


@part
def similar_states(least: float = 0.95) -> Rollout:
    """The episodes of the run's agents, where states of a group with similar texts are one (GiGPO, 2505.10978).

    Methods that compare turns in equal states (`state_key`) compare those in similar ones then. A state joins the first
    earlier one, in the order of samples and turns, of which the ratio of `difflib` is at least `least`, between 0 and
    1; at 1 these are equal ones. Its text is the environment's name of it, or its messages.

    It goes around the run's agents, and is a group alone. InputError around another rollout, and for a ratio out of
    range.
    """
    check_number("least", least, least=0, most=1)

    async def play(tools: Tools, task: Task, settings: AgentSettings) -> list[Episode]:
        paths = await gather(*(converse(tools, task, number, settings) for number in range(task.samples)))
        found = [path.one for path in paths]
        first = joined((state for one in found for state in one.states), least)
        for one in found:
            one.states = [first[state] for state in one.states]
        return [row for of_one in await graded(tools, found, settings.turn_rewards) for row in of_one]

    name = f"similar_states({least:g})"
    return replace(group(), wrap=lambda inner: with_episodes(inner, play, "the states of agents can be similar", name))
