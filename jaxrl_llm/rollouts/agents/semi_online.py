"""Episodes that are simulated on recorded trajectories of an expert."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from jaxrl_llm.core.arguments.ranges import Count, Range
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.environments.recorded import RecordedSteps
from jaxrl_llm.rollouts.agents.program import agent


@part
def semi_online(column: str = "steps", patches: Annotated[int, Range(least=-1)] = 2, turns: Count = 16) -> Rollout:
    """Groups of episodes on the trajectory in the row's `column` (`environments.recorded.RecordedSteps`).

    patches: replies of an episode that are replaced by the expert's where they deviate; -1: all. turns: most steps.
    Each step is a row, with a reward of its own, and its prompt is the dialogue so far. The final reward, the component
    `environment`, is the share of the steps that matched.
    """

    def make(row: Mapping[str, Any]) -> RecordedSteps:
        return RecordedSteps(row, column, patches)

    rollout = agent(make, turns, turn_rewards=True, fresh=True)
    return replace(rollout, name=f"semi_online({column})", columns=(column,))
