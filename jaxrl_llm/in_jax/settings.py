"""What shapes a run of the laboratory, the small decoder that it trains, and what it provides to methods.

Which needs of a method the laboratory provides, and whether the method can learn there and did.
"""

from dataclasses import dataclass
from typing import Annotated

import jax
import numpy as np
import optax

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.arguments.checks import check_fields
from jaxrl_llm.core.arguments.ranges import NonNegative, Positive, Range
from jaxrl_llm.core.needs import asks_for
from jaxrl_llm.core.population import Population
from jaxrl_llm.core.shapes import in_words
from jaxrl_llm.core.trajectory import Array
from jaxrl_llm.core.transform import Metrics
from jaxrl_llm.in_jax.tasks import Task
from jaxrl_llm.learner.optimizer import of_critic
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.policy import Params, Policy, init_params
from jaxrl_llm.models.stacks import unstack
from jaxrl_llm.reporting.credit import compares_samples
from jaxrl_llm.rollouts.programs import MEMBERS
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.keywords import settings_class

Size = Annotated[int, Range(least=1, most=2**20)]


@settings_class()
@dataclass(frozen=True)
class LabSettings:
    """What shapes a run; other numbers need another compilation."""

    iterations: Size = 100
    """Batches, each sampled by the newest policy."""
    prompts: Size = 16
    """Prompts of a batch."""
    group_size: Size = 8
    """Completions of each prompt."""
    epochs: Size = 1
    """Passes over a batch."""
    minibatches: Size = 1
    """Gradient steps of a pass; whole groups each."""
    learning_rate: NonNegative = 1e-3
    """Of Adam, where the hyper-parameters of a run do not say otherwise."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this global norm."""
    critic_rate: NonNegative = 1.0
    """Learning rate of a critic's own weights, as a multiple of the policy's."""
    hidden: Size = 32
    """Width of the decoder; its inner width is twice that."""
    layers: Size = 2
    """Layers of the decoder."""
    heads: Size = 2
    """Attention heads."""
    exact: bool = True
    """Under `vmap` runs take turns, and are bit by bit what they are alone. False computes them side by side: sums
    then round otherwise, sampled tokens change after some iterations, and only statistics agree."""


DEFAULTS = LabSettings()


def check_lab_settings(settings: LabSettings) -> None:
    """InputError for a number that is not whole, out of its range, or does not fit another."""
    if not isinstance(settings, LabSettings):
        raise InputError(f"settings must be in_jax.train.LabSettings, but is {in_words(settings)}")
    check_fields(settings)
    if settings.prompts % settings.minibatches:
        raise InputError(f"minibatches is {settings.minibatches}, but must divide the {settings.prompts} prompts")
    if settings.hidden % (2 * settings.heads):
        wanted = f"a multiple of twice the {settings.heads} heads"
        raise InputError(f"hidden is {settings.hidden}, but must be {wanted}, each of an even width")


def make_policy(task: Task, settings: LabSettings) -> Policy:
    """A small decoder for a task."""
    head_dim = settings.hidden // settings.heads
    config = ModelConfig(
        family="llama",
        vocab_size=task.vocabulary,
        hidden_size=settings.hidden,
        intermediate_size=2 * settings.hidden,
        num_layers=settings.layers,
        num_heads=settings.heads,
        num_kv_heads=settings.heads,
        head_dim=head_dim,
        norm_epsilon=1e-6,
        tie_embeddings=False,
        rope_of_layer=(0,) * settings.layers,
        window_of_layer=(0,) * settings.layers,
        query_scale=head_dim**-0.5,
    )
    return Policy(config, remat=False)


def fresh_params(key: Array, task: Task, settings: LabSettings) -> Params:
    """Random parameters, one dict a layer."""
    config = make_policy(task, settings).config
    return unstack(init_params(key, config, scale=settings.hidden**-0.5), config)


def lab_optimizer(settings: LabSettings, rate: Array | float) -> optax.GradientTransformation:
    """Adam with a bound on the norm of the gradient. The critic's own weights learn `critic_rate` times as fast."""
    steps = [optax.clip_by_global_norm(settings.max_grad_norm), optax.adam(rate)]
    if settings.critic_rate != 1:
        steps.append(optax.masked(optax.scale(settings.critic_rate), of_critic))
    return optax.chain(*steps)


EXPERIENCE = frozenset({"rollout", "curriculum", "replay"})  # what comes before the batch
PAIRS = frozenset({"chosen", "rejected"})  # columns of a data set that `Task.pairs` stands for


def task_provides(task: Task) -> frozenset[str]:
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


def unsupported_parts(method: Algorithm, task: Task) -> set[str]:
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
