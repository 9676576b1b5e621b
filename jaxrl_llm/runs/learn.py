"""The learning half of a step: a scored batch in, new parameters out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import jax.numpy as jnp

from jaxrl_llm.distributed import shard_rows
from jaxrl_llm.learner.diagnose import NotFiniteError, not_finite, refusal
from jaxrl_llm.learner.groups import fill_up
from jaxrl_llm.learner.provide import provide
from jaxrl_llm.learner.steps import filled, plan_steps
from jaxrl_llm.learner.update import prepare, update
from jaxrl_llm.models.lora import combine
from jaxrl_llm.models.policy import Params
from jaxrl_llm.needs import check_provided
from jaxrl_llm.objectives.values import value_loss
from jaxrl_llm.runs.config import TrainConfig
from jaxrl_llm.runs.setup import RunParts, needs_values
from jaxrl_llm.runs.state import RunState
from jaxrl_llm.trajectory import Trajectories

WARM_UP = value_loss()


class Learned(NamedTuple):
    """The result of `learn`."""

    state: RunState
    batch: Trajectories  # after preparation, with any rows that pad it to its full size
    metrics: dict[str, float]  # of the update
    filled: float  # fraction of positions in packed rows that hold a token


def learn(
    parts: RunParts,
    config: TrainConfig,
    state: RunState,
    params: Params,
    batch: Trajectories,
    step: int,
    feedback: Mapping[str, float],
) -> Learned:
    """Plan the gradient steps, compute what the method needs, prepare the batch, update the parameters.

    params: the policy's parameters before the update. batch: scored, on the host. feedback: metrics of the last update.
    The state's parameters and moments are donated. Raises InputError if the batch lacks what its source should provide,
    and NotFiniteError if the update was rejected because a loss, gradient or parameter was not finite.
    """
    algorithm, policy, mesh = parts.algorithm, parts.policy, parts.mesh
    check_provided(batch, algorithm.needs)
    batch = fill_up(batch, config.prompts_per_step * config.group_size, config.group_size)
    steps = plan_steps(
        batch, epochs=config.epochs, minibatches=config.minibatches, micro_batches=config.micro_batches,
        seed=(config.seed, step), mesh=mesh,
    )  # fmt: skip
    batch = shard_rows(batch, mesh)
    batch = provide(policy, algorithm.needs, params, parts.reference, batch, steps=steps)
    batch = with_feedback(batch, feedback) if "feedback" in algorithm.needs else batch
    memory, batch = prepare(algorithm.transform, state.memory, batch)
    warming = step < config.critic_steps and needs_values(algorithm)
    objective, only = (WARM_UP, "critic") if warming else (algorithm.objective, None)
    train, found = update(
        policy, objective, parts.optimizer, state.train, batch, steps=steps, only=only, frozen=parts.frozen
    )
    metrics = {name: float(value) for name, value in found.items()}
    if (finite := metrics.pop("finite")) < 1:
        what = not_finite(
            policy, objective, combine(parts.frozen, train.params), batch, steps, state=train,
            optimizer=parts.optimizer, frozen=parts.frozen, only=only,
        )  # fmt: skip
        raise NotFiniteError(refusal(step + 1, what, finite, steps))
    return Learned(state._replace(train=train, memory=memory), batch, metrics, filled(steps))


def with_feedback(batch: Trajectories, feedback: Mapping[str, float]) -> Trajectories:
    """The batch with the metrics of the last update; `feedback` is None before the first."""
    return batch.replace(feedback={name: jnp.float32(value) for name, value in feedback.items()} or None)
