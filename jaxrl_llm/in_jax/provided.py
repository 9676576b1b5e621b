"""Methods in the laboratory: which of their needs it provides, and whether they can learn there and did."""

import jax
import numpy as np

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.needs import asks_for
from jaxrl_llm.core.population import Population
from jaxrl_llm.core.transform import Metrics
from jaxrl_llm.in_jax.tasks import Task
from jaxrl_llm.reporting.credit import compares_samples
from jaxrl_llm.rollouts.programs import MEMBERS
from jaxrl_llm.utils.errors import InputError

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


def check_lone(method: Algorithm) -> None:
    """InputError for a method that compares the samples of a prompt, which has only one."""
    if "turns" not in method.needs and compares_samples(method):
        raise InputError(
            "group_size is 1, but must be at least 2: the method compares the completions of a prompt with each other, "
            "and has nothing to learn from one"
        )


def check_losses(metrics: Metrics) -> None:
    """InputError where a loss at hand is infinite or NaN; those of traced runs pass."""
    loss = metrics.get("loss")
    if loss is None or isinstance(loss, jax.core.Tracer) or not loss.is_fully_addressable:
        return
    wrong = ~np.isfinite(np.asarray(loss))
    if loss.ndim == 1 and wrong.any():
        raise InputError(
            f"the loss is not finite from iteration {int(np.argmax(wrong))} on: look for advantages that are infinite "
            "or NaN, such as a division by 0 in the transform, and for the learning rate"
        )
