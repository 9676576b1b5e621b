"""One iteration of learning: a scored batch in, new parameters out, at once or turn by turn; the state before the first
one, and its programs compiled ahead of time.

`inputs.provide` computes what a method needs beyond a sampled and scored batch from the policies at hand.
Batches can be filled up to one size (`microbatches.fill_up`).
"""

import dataclasses
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl_llm.core.algorithm import TURN_FACTOR, Algorithm, TurnPhases, turn_in_episode
from jaxrl_llm.core.buckets import bucket_sums, joint_key
from jaxrl_llm.core.reference import Mixture
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.core.transform import Metrics, Objective, RunFacts
from jaxrl_llm.distributed.aot import Program, ahead_of_time, compiled, computed, place
from jaxrl_llm.distributed.mesh import replicate, to_mesh
from jaxrl_llm.distributed.sharding import fully_sharded
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.learner.microbatches import Steps, plan_steps
from jaxrl_llm.learner.router_balance import RouterBalance
from jaxrl_llm.learner.teacher import FrozenPolicy, Teachers, with_head
from jaxrl_llm.learner.train_state import TrainState, init_state
from jaxrl_llm.learner.update import FIRST, prepare, update
from jaxrl_llm.models.layers.routing import routing_of
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.objectives.off_policy import compounded


class Learner(NamedTuple):
    """What all iterations have in common."""

    policy: Policy
    algorithm: Algorithm
    optimizer: optax.GradientTransformation
    mesh: Mesh
    epochs: int = 1
    minibatches: int = 1
    micro_batches: int = 1
    reference: Params | Mixture | None = None  # of the reference policy, where the method needs one
    frozen: Params | None = None  # the parameters that never learn, where some do not
    policies: Mapping[str, Params] = {}  # others that move, by name: "previous", before the last update, "target" ...
    balance: RouterBalance | None = None  # how the experts of a mixture are kept busy
    teacher: FrozenPolicy | Teachers | None = None  # instead of the reference


class LearnedBatch(NamedTuple):
    """What an iteration gives."""

    state: TrainState
    memory: Any  # of the algorithm's transform
    batch: Trajectories  # as the transform prepared it, on the devices
    steps: Steps
    metrics: Metrics
    policies: Mapping[str, Params] = {}  # the learner's, of which "previous" has the parameters before this update


def learn_batch(
    learner: Learner,
    state: TrainState,
    memory: Any,
    batch: Trajectories,
    seed: Any = 0,
    objective: Objective | None = None,
    only: str | None = None,
) -> LearnedBatch:
    """Plan the gradient steps, put the batch on the mesh, provide, prepare, update. The state is donated, like the
    learner's "previous" policy.

    batch: scored, on the host, with the last update's metrics as `feedback` where there are some. seed: of the order of
    rows; see `plan_steps`. objective: instead of the algorithm's. only: the one entry of the parameters that learns; by
    default all do. With the algorithm's `phases` each turn has an update of its own. Of a mixture of experts the
    algorithm's `routing` is replayed; InputError where the batch lacks the experts that it was sampled with.
    """
    learner = learner._replace(policy=as_sampled(learner.policy, learner.algorithm))
    policy, algorithm, mesh = learner.policy, learner.algorithm, learner.mesh
    routing = routing_of(algorithm.routing, policy, batch)
    marks, slices = (batch.info or {}).get("measured"), learner.minibatches * learner.micro_batches
    # The rows that the update takes, where others are marked that only `provide` reads; None: all.
    measured: Any = np.zeros(0, bool) if marks is None else np.asarray(marks) > 0
    trained = np.flatnonzero(~measured) if measured.any() else None
    steps = plan_steps(
        batch, epochs=learner.epochs, minibatches=learner.minibatches, micro_batches=learner.micro_batches, seed=seed,
        mesh=mesh, rows=trained, runs=policy.config.recurrent,
    )  # fmt: skip
    every = steps
    if trained is not None:  # slices as long as those of the update, over all rows
        times = len(batch.tokens) / len(trained)
        parts = slices * (int(times) if times.is_integer() else 1)
        every = plan_steps(batch, micro_batches=parts, mesh=mesh, runs=policy.config.recurrent)
    phase = Phase(steps, every, routing == "recompute", objective, only)
    if algorithm.phases is None:
        return _learn(learner, state, memory, to_mesh(batch, mesh), phase)
    count, batch = phase_count(batch), without_factor(batch)
    return by_turns(learner, state, memory, to_mesh(batch, mesh), phase, algorithm.phases, count)


def as_sampled(policy: Policy, algorithm: Algorithm) -> Policy:
    """The policy as the method's samples are drawn: by the members of a population, or with soft thoughts, if so."""
    if (rollout := algorithm.rollout) is None or (rollout.population is None and rollout.thinking is None):
        return policy
    return dataclasses.replace(policy, population=rollout.population, thinking=rollout.thinking)


class Phase(NamedTuple):
    """How a batch, or a turn of it, is learned from."""

    steps: Steps
    every: Steps  # slices over all rows, also those that are only measured
    record_experts: bool
    objective: Objective | None
    only: str | None
    turn: int | None = None  # the one whose tokens are trained on; None: all
    before: jax.Array | None = None  # f32[N, L]: log-probabilities before the last phase


def _learn(
    learner: Learner, state: TrainState, memory: Any, batch: Trajectories, phase: Phase, rule: TurnPhases | None = None
) -> LearnedBatch:
    policy, algorithm, steps, only = learner.policy, learner.algorithm, phase.steps, phase.only
    params, feedback = combine(learner.frozen, state.params), batch.feedback
    # Without the feedback, which no policy reads: there is none before the first update, and then another program.
    policies = dict(learner.policies)
    previous = combine(learner.frozen, policies["previous"]) if "previous" in policies else None
    batch = provide(
        policy, algorithm.needs, params, learner.reference, batch.replace(feedback=None), phase.every,
        previous, phase.record_experts, policies.get("target"), learner.teacher,
    )  # fmt: skip
    if "previous" in policies:
        policies["previous"] = replaced(policies["previous"], state.params)
    if rule is not None and phase.turn is not None and phase.before is not None:
        batch = factor_after(batch, phase.before, np.int32(phase.turn + 1), clip=rule.clip)
    experts = batch.experts  # which no transform reads, nor copies
    memory, batch = prepare(algorithm.transform, memory, batch.replace(feedback=feedback, experts=None))
    batch = batch.replace(experts=experts)
    if phase.turn is not None:  # only now, since advantages are those of all turns
        batch = alone_at(batch, np.int32(phase.turn))
    objective = algorithm.objective if phase.objective is None else phase.objective
    policy, frozen = with_head(policy, objective.needs, learner.frozen, learner.teacher, learner.reference)
    state, metrics = update(
        policy, objective, learner.optimizer, state, batch, steps, only=only, frozen=frozen, balance=learner.balance
    )
    return LearnedBatch(state, memory, batch, steps, metrics, policies)


def replaced(previous: Params, params: Params) -> Params:
    """A copy of the parameters, without a critic, in the place of what `previous` takes, so that there is one copy."""
    if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(previous)):  # shapes: programs are only compiled
        return previous
    jax.tree.map(lambda x: x.delete(), previous)
    return jax.tree.map(jnp.copy, {name: params[name] for name in previous})


def phase_count(batch: Trajectories) -> int:
    """Turns of the longest episode of a batch on the host, at least 1."""
    return max(int(np.max(np.asarray(turn_in_episode(batch)), initial=0)) + 1, 1)


def without_factor(batch: Trajectories) -> Trajectories:
    """The batch, on the host, with a turn factor of 1, as before the first phase."""
    one: Any = np.ones(batch.group.shape, np.float32)
    return batch.with_info(**{TURN_FACTOR: one})


def at_turn(batch: Trajectories, turn: Array) -> Trajectories:
    """The batch in which only the tokens of a turn, int32[], have a weight."""
    return batch.replace(weights=jnp.where(turn_in_episode(batch) == turn, batch.loss_weights, 0.0))


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
    learner: Learner, state: TrainState, memory: Any, batch: Trajectories, phase: Phase, rule: TurnPhases, count: int
) -> LearnedBatch:
    """One phase for each turn, the last first. Metrics are means over the phases."""
    found: LearnedBatch | None = None
    metrics: list[Metrics] = []
    whole = batch
    for turn in reversed(range(count)):
        now = phase._replace(turn=turn, before=None if found is None else found.batch.old_logp)
        if found is not None:
            learner = learner._replace(policies=found.policies)
            state, memory = found.state, found.memory
            batch = batch.with_info(turn_factor=found.batch.need("turn_factor"))
        found = _learn(learner, state, memory, batch, now, rule)
        whole = found.batch if not metrics else _joined(whole, found.batch, np.int32(turn))
        metrics.append(found.metrics)
    assert found is not None
    return found._replace(batch=whole, metrics=_means(metrics))


def start(
    policy: Policy,
    algorithm: Algorithm,
    optimizer: optax.GradientTransformation,
    params: Params,
    facts: RunFacts | None,
    mesh: Mesh,
) -> tuple[TrainState, Any]:
    """The state before the first update, sharded by `fully_sharded`, and the memory of the algorithm's transform."""
    # Everything is on the mesh from the start: a step over arrays of another placement would be compiled again.
    memory = computed(lambda: algorithm.transform.init(facts))
    init = jax.jit(optimizer.init)  # one program, not one for each shape
    if mesh.size > 1:  # no device has all moments, not even for a moment
        spread = fully_sharded(jax.eval_shape(optimizer.init, params), policy.config, mesh)
        init = jax.jit(optimizer.init, out_shardings=spread)
    optimizer = optimizer._replace(init=init)
    state = computed(lambda params: init_state(params, optimizer), params)
    return shard(state, policy, mesh), replicate(memory, mesh)


def shard(tree: Any, policy: Policy, mesh: Mesh) -> Any:
    """Parameters, or a state of training, on the devices of the mesh as `fully_sharded` says."""
    return place(tree, fully_sharded(jax.eval_shape(lambda x: x, tree), policy.config, mesh))


def compile_learning(
    learner: Learner, params: Params, batch: Trajectories, facts: RunFacts | None = None, platform: str | None = None,
    beside: Executor | None = None,
) -> list[Program]:  # fmt: skip
    """The programs of an iteration, in their order, compiled for the learner's mesh, whose devices need not be there.

    params: shapes of the parameters that learn; the learner's other parameters are shapes too. batch: numbers on the
    host, as rollouts give them: how long its rows are decides the shapes. platform, beside: see `ahead_of_time`.
    """
    with ahead_of_time(platform, beside) as programs:
        params, reference, frozen = shard((params, learner.reference, learner.frozen), learner.policy, learner.mesh)
        learner = learner._replace(reference=reference, frozen=frozen)
        state, memory = start(learner.policy, learner.algorithm, learner.optimizer, params, facts, learner.mesh)
        learn_batch(learner, state, memory, batch)
    return programs
