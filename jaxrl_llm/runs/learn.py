"""The learning half of a step: a scored batch in, new parameters out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from jaxrl_llm.learner.diagnose import NotFiniteError, not_finite, refusal
from jaxrl_llm.learner.groups import fill_up
from jaxrl_llm.learner.learn import Learner, learn_batch
from jaxrl_llm.learner.steps import filled
from jaxrl_llm.models.lora import combine
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


def learner_of(parts: RunParts, config: TrainConfig) -> Learner:
    """The `Learner` of a run."""
    return Learner(
        parts.policy, parts.algorithm, parts.optimizer, parts.mesh, config.epochs, config.minibatches,
        config.micro_batches, parts.reference, parts.frozen,
    )  # fmt: skip


def learn(
    parts: RunParts,
    config: TrainConfig,
    state: RunState,
    batch: Trajectories,
    step: int,
    feedback: Mapping[str, float],
) -> Learned:
    """Fill up the batch and learn from it. The state's parameters and moments are donated.

    batch: scored, on the host. feedback: metrics of the last update. Raises InputError if the batch lacks what its
    source should provide, and NotFiniteError if the update was rejected because a loss, gradient or parameter was not
    finite.
    """
    learner = learner_of(parts, config)
    check_provided(batch, learner.algorithm.needs)
    batch = fill_up(batch, config.prompts_per_step * config.group_size, config.group_size)
    batch = with_feedback(batch, feedback) if "feedback" in learner.algorithm.needs else batch
    warming = step < config.critic_steps and needs_values(learner.algorithm)
    objective, only = (WARM_UP, "critic") if warming else (learner.algorithm.objective, None)
    train, memory, batch, steps, found = learn_batch(
        learner, state.train, state.memory, batch, (config.seed, step), objective, only
    )
    metrics = {name: float(value) for name, value in found.items()}
    if (finite := metrics.pop("finite")) < 1:
        what = not_finite(
            parts.policy, objective, combine(parts.frozen, train.params), batch, steps, state=train,
            optimizer=parts.optimizer, frozen=parts.frozen, only=only,
        )  # fmt: skip
        raise NotFiniteError(refusal(step + 1, what, finite, steps))
    return Learned(state._replace(train=train, memory=memory), batch, metrics, filled(steps))


def with_feedback(batch: Trajectories, feedback: Mapping[str, float]) -> Trajectories:
    """The batch with the metrics of the last update; `feedback` is None before the first."""
    return batch.replace(feedback={name: np.float32(value) for name, value in feedback.items()} or None)
