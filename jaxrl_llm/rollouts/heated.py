"""Rollouts whose tokens are drawn at a temperature that depends on the level of their entropy."""

from __future__ import annotations

from dataclasses import replace

from jaxrl_llm.entropy_levels import ENTRIES, Levels
from jaxrl_llm.expressions import part
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.programs import Rollout
from jaxrl_llm.rollouts.tools import Task, Tools


@part
def heated(rollout: Rollout) -> Rollout:
    """A rollout whose tokens are drawn at temperatures by entropy, with the levels in the controls of the last update.

    Before the first update all tokens have the run's temperature. Provides the levels of each episode,
    info["level_tau"] and others (`entropy_levels.ENTRIES`), from which the update computes the same temperatures.
    """

    async def program(tools: Tools, task: Task) -> list[Episode]:
        levels = dict(zip(ENTRIES, Levels(), strict=True))
        levels = {name: float(tools.controls.get(name, value)) for name, value in levels.items()}
        return [episode.with_info(**levels) for episode in await rollout.program(tools, task)]

    return replace(
        rollout, program=program, name=f"{rollout.name}, heated", provides=rollout.provides | {"level_tau"}, heated=True
    )
