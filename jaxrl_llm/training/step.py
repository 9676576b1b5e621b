"""The learning half of a step of the host loop: the update, its metrics, and the way back from a loss spike.

PaLM (2204.02311, section 5.1) restarted from a checkpoint some 100 steps before each spike and skipped 200 to 500
batches: spikes came of certain batches at certain parameters, not of bad data. Here, too, parameters, optimiser and the
method's memory go back, and the batches since are skipped: the prompts go on. What differs: a robust bound decides
(`loss_spikes`), not a person; the checkpoint is the last one; and steps are counted on, so that no random numbers and
no lines of the logs come twice. A resumed run repeats all of it, bit by bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.core.needs import asks_for
from jaxrl_llm.core.source import Step
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.distributed.hosts import to_numpy
from jaxrl_llm.learner.checks import check_batch_provides
from jaxrl_llm.learner.microbatches import filled_share
from jaxrl_llm.learner.nonfinite import NotFiniteError, not_finite, refusal
from jaxrl_llm.learner.step import Learner, as_sampled, learn_batch
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.objectives import value_loss
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.checkpoints import Checkpoints
from jaxrl_llm.training.full_size import at_full_size
from jaxrl_llm.training.health.goodput import Clock, useful
from jaxrl_llm.training.health.loss_spikes import SpikeRule, judge
from jaxrl_llm.training.method import balance_of
from jaxrl_llm.training.metrics import Learned, step_metrics
from jaxrl_llm.training.other_policies.reference import moved, reference_now, with_second_policy
from jaxrl_llm.training.other_policies.teacher import for_teacher
from jaxrl_llm.training.setup import RunParts
from jaxrl_llm.training.state import LoopState, RunState, restored_state, shapes_of_state

if TYPE_CHECKING:
    from jaxrl_llm.training.running import Running


WARM_UP = value_loss()


def learn(
    parts: RunParts, config: TrainConfig, state: RunState, batch: Trajectories, step: int, feedback: Mapping[str, float]
) -> tuple[RunState, Learned]:
    """The learning half of a step: fill up the batch and learn from it. The state's parameters and moments are donated.

    batch: scored, on the host. feedback: metrics of the last update. Raises InputError if the batch lacks what its
    source should provide, and NotFiniteError if the update was rejected because a loss, gradient or parameter was not
    finite.
    """
    policy = as_sampled(dataclasses.replace(parts.policy, hook=parts.hook), parts.algorithm)
    frozen = with_second_policy(state.policies.get("other"), parts.frozen)
    rule = parts.algorithm.reference
    share = 0.0 if rule is None else rule.initial_share
    reference = reference_now(parts.reference, state.policies.get("reference"), parts.frozen, share)
    learner = Learner(
        policy, parts.algorithm, parts.optimizer, parts.mesh, config.epochs_at(step), config.minibatches,
        config.micro_batches, reference, frozen, state.policies, balance_of(config),
        parts.computed_teacher,
    )  # fmt: skip
    if "staleness" in learner.algorithm.needs:
        stale: Any = np.maximum(np.where(batch.action_mask, step - batch.policy_step, 0), 0)
        batch = batch.with_info(staleness=stale)
    later = frozenset[str]() if learner.algorithm.phases is None else learner.algorithm.phases.provides
    check_batch_provides(batch, learner.algorithm.needs - later)
    batch = for_teacher(parts.teacher, batch, parts.prompts.rows, learner.algorithm.needs)
    batch = at_full_size(batch, config.prompts_per_step * config.group_size, config.group_size)
    if "feedback" in learner.algorithm.needs:  # None before the first update
        batch = batch.replace(feedback={name: np.float32(value) for name, value in feedback.items()} or None)
    warming = step < config.critic_steps and asks_for(learner.algorithm.needs, "values")
    objective, only = (WARM_UP, "critic") if warming else (learner.algorithm.objective, None)
    train, memory, batch, steps, found, policies = learn_batch(
        learner, state.train, state.memory, batch, (config.seed, step), objective, only
    )
    batch, steps = to_numpy((batch, steps), parts.mesh)
    metrics = {name: float(value) for name, value in found.items()}
    if (finite := metrics.pop("finite")) < 1:
        what = not_finite(
            policy, objective, combine(frozen, train.params), batch, steps, state=train,
            optimizer=parts.optimizer, frozen=frozen, only=only,
        )  # fmt: skip
        raise NotFiniteError(refusal(step + 1, what, finite, steps))
    policies = moved(parts.rules, policies, train.params, step + 1)
    state = state._replace(train=train, memory=memory, policies=policies)
    return state, Learned(batch, metrics, filled_share(steps))


def learn_from(run: Running, found: Step, step: int) -> Learned:
    """Learn from a batch, and tell its source."""
    config, loop, source = run.config, run.loop, run.source
    with run.clock("update"):
        run.state, learned = learn(run.parts, config, run.state, found.scored.batch, step, loop.feedback)
    run.state = run.state._replace(source=source.on_update(run.state.source, learned.batch))
    return learned


def measured(run: Running, found: Step, learned: Learned) -> dict[str, float]:
    """The metrics of the step at hand; those of its update are the next one's feedback."""
    metrics = step_metrics(run.parts, found, learned, sum(run.clock.seconds.values()) - run.lap, run.taken)
    run.stop_if_told(finish=True)  # after SIGTERM the step is finished from here on
    run.loop.feedback = {**learned.metrics, "updates": run.loop.feedback.get("updates", 0.0) + 1}
    return metrics


def without_spike(run: Running) -> StepOutcome:
    """Go back to the last checkpoint if the step was a loss spike; see the module."""
    judged = StepOutcome(run.state)
    if run.config.spike_factor:
        judged = undo_spike(run.config, run.state, run.loop, run.checkpoints, run.clock)
    run.state = judged.state
    return judged


class StepOutcome(NamedTuple):
    """What comes of a step."""

    state: RunState  # to go on from
    metrics: Mapping[str, float] = MappingProxyType({})
    notes: Sequence[str] = ()  # to print


def undo_spike(
    config: TrainConfig, state: RunState, loop: LoopState, checkpoints: Checkpoints, clock: Clock
) -> StepOutcome:
    """Go back to the last checkpoint if step `loop.step` is a spike.

    state: after that step, whose metrics are `loop.feedback`. If the step is undone its parameters and moments are
    deleted, so that there are never two copies, and the loop's feedback is as of the checkpoint.
    """
    rule = SpikeRule(config.spike_metrics, config.spike_factor, config.spike_window, config.spike_rollbacks)
    there = bool(checkpoints.steps())
    number = f"step {loop.step + 1}"
    loop.spikes, spike, undo = judge(loop.spikes, loop.step, loop.feedback, rule, undoable=there)
    if not undo:
        why = f"{rule.rollbacks} in {rule.window} steps were" if there else "there is no checkpoint to go back to"
        return StepOutcome(state, {"rollback": 0.0}, [f"{number}: {spike}; not rolled back: {why}"] if spike else [])
    with clock("checkpoint"):
        checkpoints.wait()
        shapes = shapes_of_state(state)
        jax.tree.map(lambda x: x.delete(), state.train)
        restored = checkpoints.latest(*shapes)
    assert restored is not None  # `latest` raises InputError where none can be used
    loop.feedback = restored.meta["feedback"]
    loop.undone = restored.meta.get("undone", 0.0) + useful(clock.seconds) - useful(restored.meta["seconds"])
    note = f"{number}: {spike}; going back to the checkpoint of step {restored.step}, and on with the next prompts"
    return StepOutcome(restored_state(restored, state.source), {"rollback": 1.0}, [note])
