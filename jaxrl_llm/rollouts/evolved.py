"""Rollouts whose samples are drawn by the members of a population, each with weights of its own."""

from __future__ import annotations

from dataclasses import replace

from jaxrl_llm.core.population import Population
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.rollout import Rollout, drawn
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.utils.errors import InputError, shown

MEMBERS = frozenset({"member", "member_seed"})


@part
def evolved(rollout: Rollout, population: Population) -> Rollout:
    """A rollout in which sample i of the j-th prompt of a step, of g samples each, is that of member j g + i, greedy.

    All randomness is in the weights, see `core.population`. Two members that share their noise answer the same prompt
    where g is even. Samples at a temperature of their own, greedy ones, those of evaluations and of a reference policy
    are the policy's. It provides info["member"], the member's number, and info["member_seed"], the seed of the noise.
    Raises InputError for a rollout that is drawn otherwise already.
    """
    if not isinstance(population, Population):
        raise InputError(f"the population is {shown(population)}, but must be a jaxrl_llm.core.population.Population")
    return drawn(rollout, population, "evolved", MEMBERS)


@part
def members(population: Population) -> Rollout:
    """The run's own rollout, such as the agents of an environment, `evolved`; else a group of samples."""
    own = evolved(group(), population)
    return replace(own, wrap=lambda rollout: evolved(rollout, population))
