"""Rollouts whose tokens are drawn at a temperature that depends on the level of their entropy."""

from __future__ import annotations

from jaxrl_llm.core.entropy_levels import BY_LEVEL
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Rollout
from jaxrl_llm.rollouts.hooked import hooked


@part
def heated(rollout: Rollout) -> Rollout:
    """A rollout whose tokens are drawn at temperatures by entropy, with the levels in the controls of the last update.

    Before the first update all tokens have the run's temperature. Provides the levels of each episode,
    info["level_tau"] and others (`entropy_levels.ENTRIES`), from which the update computes the same temperatures.
    """
    return hooked(rollout, BY_LEVEL, ("level_tau",))
