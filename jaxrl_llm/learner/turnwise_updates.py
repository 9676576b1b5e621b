"""The batches of an update turn by turn: what each phase of `TurnPhases` trains on, and the factor that it leaves."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.algorithm import TURN_FACTOR, TurnPhases, turn_in_episode
from jaxrl_llm.core.buckets import bucket_sums, joint_key
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.core.transform import Metrics
from jaxrl_llm.distributed.aot import compiled
from jaxrl_llm.learner.train_state import TrainState
from jaxrl_llm.learner.update import FIRST
from jaxrl_llm.objectives.off_policy import compounded

if TYPE_CHECKING:
    from jaxrl_llm.learner.step import LearnedBatch, Learner, Phase


def phase_count(batch: Trajectories) -> int:
    """Turns of the longest episode of a batch on the host, at least 1."""
    return max(int(np.max(np.asarray(turn_in_episode(batch)), initial=0)) + 1, 1)


def without_factor(batch: Trajectories) -> Trajectories:
    """The batch, on the host, with a turn factor of 1, as before the first phase."""
    one: Any = np.ones(batch.group.shape, np.float32)
    return batch.with_info(**{TURN_FACTOR: one})


def at_turn(batch: Trajectories, turn: Array) -> Trajectories:
    """The batch in which only the tokens of a turn, int32[], have a weight."""
    chosen = turn_in_episode(batch) == turn
    return batch.replace(weights=jnp.where(chosen, batch.loss_weights, 0.0))


def after_turn(batch: Trajectories, before: Array, turn: Array, clip: float) -> Trajectories:
    """The batch with the factor after the phase of a turn.

    batch: its `old_logp` f32[N, L] is of the parameters after the phase. before: of those before it.
    """
    chosen = turn_in_episode(batch) == turn
    change = jnp.where(chosen, batch.need("old_logp") - before, 0.0)
    info = batch.info or {}
    key = jnp.arange(batch.group.shape[0])
    if "episode" in info and "first_turn" in info:
        key = joint_key(batch.group, jnp.nan_to_num(info["episode"]).astype(jnp.int32))
    total, count = bucket_sums(key, jnp.sum(change, axis=1), jnp.sum(chosen, axis=1).astype(jnp.float32))
    mean = total / jnp.maximum(count, 1)
    factor = compounded(batch.need(TURN_FACTOR), mean[:, None], (count > 0)[:, None], clip)
    return batch.with_info(**{TURN_FACTOR: factor})


def joined(whole: Trajectories, phase: Trajectories, turn: Array) -> Trajectories:
    """The batch of a phase with what earlier phases, in `whole`, computed for the tokens of later turns.

    For records: advantages, weights and old log-probabilities of each token are those with which it was trained.
    """
    later = turn_in_episode(whole) > turn
    fields = {
        name: jnp.where(later, getattr(whole, name), getattr(phase, name))
        for name in ("advantages", "weights", "old_logp")
        if getattr(whole, name) is not None and getattr(phase, name) is not None
    }
    return phase.replace(**fields)


def _mean_metrics(phases: list[Metrics]) -> Metrics:
    """Means over the phases; those of the first gradient step are of the first."""
    return {
        name: phases[0][name] if name in FIRST else jnp.mean(jnp.stack([one[name] for one in phases]))
        for name in phases[0]
    }


alone_at, _joined, _means = compiled()(at_turn), compiled()(joined), compiled()(_mean_metrics)
factor_after = compiled(static_argnames=("clip",))(after_turn)


def by_turns(
    learn: Callable[..., LearnedBatch], learner: Learner, state: TrainState, memory: Any, batch: Trajectories,
    phase: Phase, rule: TurnPhases, count: int,
) -> LearnedBatch:  # fmt: skip
    """One phase for each turn, the last first. learn: of one phase. Metrics are means over the phases."""
    found: LearnedBatch | None = None
    metrics: list[Metrics] = []
    whole = batch
    for turn in reversed(range(count)):
        now = phase._replace(turn=turn, before=None if found is None else found.batch.old_logp)
        if found is not None:
            learner = learner._replace(policies=found.policies)
            state, memory = found.state, found.memory
            batch = batch.with_info(turn_factor=found.batch.need("turn_factor"))
        found = learn(learner, state, memory, batch, now, rule)
        whole = found.batch if not metrics else _joined(whole, found.batch, np.int32(turn))
        metrics.append(found.metrics)
    assert found is not None
    return found._replace(batch=whole, metrics=_means(metrics))
