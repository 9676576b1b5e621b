"""What the laboratory has of what methods ask for: needs, rollouts, pairs and populations."""

from __future__ import annotations

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.needs import asks_for
from jaxrl_llm.core.population import Population
from jaxrl_llm.in_jax.tasks import Task
from jaxrl_llm.rollouts.hooked import MEMBERS

EXPERIENCE = frozenset({"rollout", "curriculum", "replay"})  # what comes before the batch
PAIRS = frozenset({"chosen", "rejected"})  # columns of a data set that `Task.pairs` stands for


def provided(task: Task) -> frozenset[str]:
    """What runs on a task provide of the needs that only some runs provide."""
    found = {"greedy_reward"} | (set(MEMBERS) if task.environment is None else set())
    if task.given is not None or task.environment is not None:
        found.add("turns")
    if task.environment is not None:
        found |= {"turn_rewards", "state_key", "episode", "first_turn"}
        found |= set() if task.environment.calls is None else {"calls", "failed_calls"}
    return frozenset(found)


def by_turn(method: Algorithm) -> bool:
    """Whether a method is given the rewards of turns apart from the final one: those that need them or equal states,
    and those of turns with a critic. Others learn from the sum."""
    needs = method.needs
    return asks_for(needs, "turn_rewards", "state_key") or (asks_for(needs, "turns") and asks_for(needs, "values"))


def trains_on_pairs(method: Algorithm, task: Task) -> bool:
    """Whether a method learns from a chosen and a rejected response, which the task has."""
    rollout = method.rollout
    return task.pairs is not None and rollout is not None and rollout.demands.given and {*rollout.columns} == PAIRS


def experience_of(method: Algorithm, task: Task) -> set[str]:
    """Which of rollout, curriculum and replay a method names, that the task does not have."""
    rollout = method.rollout
    if trains_on_pairs(method, task) or population_of(method, task) is not None:
        rollout = None
    found = {"rollout": rollout, "curriculum": method.prompts, "replay": method.replay}
    return {name for name, value in found.items() if value is not None}


def population_of(method: Algorithm, task: Task) -> Population | None:
    """The population whose members draw the method's samples, of a task of one turn."""
    rollout = method.rollout
    return None if rollout is None or rollout.wrap is None or task.environment is not None else rollout.population
