"""One step's learning: a scored batch in, new parameters out."""

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
from jaxrl_llm.objectives.values import value_loss
from jaxrl_llm.runs.config import TrainConfig
from jaxrl_llm.runs.setup import Parts, needs_values
from jaxrl_llm.runs.state import RunState
from jaxrl_llm.trajectory import Trajectories

WARM_UP = value_loss()


class Learned(NamedTuple):
    """What a step's learning gave."""

    state: RunState
    batch: Trajectories  # as the method prepared it, filled up
    metrics: dict[str, float]  # of the update
    filled: float  # share of places in packed rows that hold a token


def learn(
    parts: Parts,
    config: TrainConfig,
    state: RunState,
    params: Params,
    batch: Trajectories,
    step: int,
    feedback: Mapping[str, float],
) -> Learned:
    """Plan, provide, prepare, update. The state's parameters and moments are donated.

    params: the policy's, before the update. batch: scored, on the host. feedback: metrics of the last update.
    Raises NotFiniteError where the update was not taken, because a number in it was not finite.
    """
    algorithm, policy, mesh = parts.algorithm, parts.policy, parts.mesh
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
    """The batch with the metrics of the last update, if there was one."""
    return batch.replace(feedback={name: jnp.float32(value) for name, value in feedback.items()} or None)
