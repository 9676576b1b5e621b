"""Rollouts that take completions from a column of the data set: supervised steps, alone, before or beside samples.

A demonstration is an episode whose actions are the column's text, or the assistant's messages, and the token that ends
a turn. It was not sampled, so that its `behaviour_logp` is 0: methods read its log-probabilities as `old_logp`, or not
at all.
"""

from __future__ import annotations

from jaxrl_llm.core.arguments.ranges import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Demands, Rollout
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.guidance.responses import response
from jaxrl_llm.rollouts.program_host import Task
from jaxrl_llm.rollouts.programs import group

NEED = "demonstrated"


def demonstration(tools: Tools, task: Task, column: str) -> Episode:
    """The row's `response` in a column as an episode with info["demonstrated"] 1."""
    return response(tools, task, column).with_info(demonstrated=1.0)


@part
def demonstrated(column: str = "answer") -> Rollout:
    """The demonstration of each prompt alone: nothing is sampled. A step has `prompts_per_step` of them.

    column: of the data set, with the texts. Set group_size to 1. Provides info["demonstrated"], 1 for these episodes.
    """

    async def program(tools: Tools, task: Task) -> list[Episode]:
        return [demonstration(tools, task, column)]

    return Rollout(
        program,
        f"demonstrated({column})",
        frozenset({NEED}),
        (column,),
        demands=Demands(variable_size=True, max_episodes=lambda G: 1),
    )


@part
def demonstrated_before(step: int, column: str = "answer") -> Rollout:
    """Demonstrations in the steps before `step`, and groups of samples from there on.

    Provides info["demonstrated"]. Raises InputError unless step is a whole number, at least 0.
    """
    check_number("demonstrated_before: step", step, least=0, whole=True)

    async def program(tools: Tools, task: Task) -> list[Episode]:
        if tools.first_step < step:
            return [demonstration(tools, task, column)]
        return [one.with_info(demonstrated=0.0) for one in await group().program(tools, task)]

    return Rollout(
        program,
        f"demonstrated_before({step}, {column})",
        frozenset({NEED}),
        (column,),
        demands=Demands(variable_size=True),
    )
