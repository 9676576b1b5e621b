"""One iteration of learning: a scored batch in, new parameters out; as runs call it, and compiled ahead of time.

`inputs.provide` computes what a method needs beyond a sampled and scored batch from the policies at hand.
Batches can be filled up to one size (`fill_up`).
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.reference import Mixture
from jaxrl_llm.core.trajectory import Trajectories, map_rows
from jaxrl_llm.core.transform import Metrics, Objective, RunFacts
from jaxrl_llm.core.turnwise_updates import TurnPhases
from jaxrl_llm.distributed.aot import Program, ahead_of_time, compiled, computed, place
from jaxrl_llm.distributed.fully_sharded import fully_sharded
from jaxrl_llm.distributed.mesh import replicate, to_mesh
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.learner.microbatches import Steps, plan_steps
from jaxrl_llm.learner.router_balance import RouterBalance
from jaxrl_llm.learner.turnwise_updates import after_turn, at_turn, joined, phase_count, without_factor
from jaxrl_llm.learner.update import FIRST, TrainState, init_state, prepare, update
from jaxrl_llm.models.layers.routing import routing_of
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.models.policy import Params, Policy


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


class LearnedBatch(NamedTuple):
    """What an iteration gives."""

    state: TrainState
    memory: Any  # of the algorithm's transform
    batch: Trajectories  # as the transform prepared it, on the devices
    steps: Steps
    metrics: Metrics
    policies: Mapping[str, Params] = {}  # the learner's, of which "previous" has the parameters before this update


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
    if mesh.size > 1:  # no device has all moments, not even for a moment
        spread = fully_sharded(jax.eval_shape(optimizer.init, params), policy.config, mesh)
        moments = jax.jit(optimizer.init, out_shardings=spread)
        optimizer = optimizer._replace(init=moments)
    state = computed(lambda params: init_state(params, optimizer), params)
    return shard(state, policy, mesh), replicate(memory, mesh)


def shard(tree: Any, policy: Policy, mesh: Mesh) -> Any:
    """Parameters, or a state of training, on the devices of the mesh as `fully_sharded` says."""
    return place(tree, fully_sharded(jax.eval_shape(lambda x: x, tree), policy.config, mesh))


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
    policy, algorithm, mesh = learner.policy, learner.algorithm, learner.mesh
    routing = routing_of(algorithm.routing, policy, batch)
    trained, slices = _trained(batch), learner.minibatches * learner.micro_batches
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
    return _by_turns(learner, state, memory, to_mesh(batch, mesh), phase, algorithm.phases, count)


class Phase(NamedTuple):
    """How a batch, or a turn of it, is learned from."""

    steps: Steps
    every: Steps  # slices over all rows, also those that are only measured
    record_experts: bool
    objective: Objective | None
    only: str | None
    turn: int | None = None  # the one whose tokens are trained on; None: all
    before: jax.Array | None = None  # f32[N, L]: log-probabilities before the last phase


def _mean_metrics(phases: list[Metrics]) -> Metrics:
    """Means over the phases; those of the first gradient step are of the first."""
    return {
        name: phases[0][name] if name in FIRST else jnp.mean(jnp.stack([one[name] for one in phases]))
        for name in phases[0]
    }


_at_turn, _joined, _means = compiled()(at_turn), compiled()(joined), compiled()(_mean_metrics)
_after_turn = compiled(static_argnames=("clip",))(after_turn)


def _by_turns(
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


def _learn(
    learner: Learner, state: TrainState, memory: Any, batch: Trajectories, phase: Phase, rule: TurnPhases | None = None
) -> LearnedBatch:
    """Provide, prepare, update, with a batch on the mesh."""
    policy, algorithm, steps, only = learner.policy, learner.algorithm, phase.steps, phase.only
    params, feedback = combine(learner.frozen, state.params), batch.feedback
    # Without the feedback, which no policy reads: there is none before the first update, and then another program.
    policies = dict(learner.policies)
    previous = combine(learner.frozen, policies["previous"]) if "previous" in policies else None
    batch = provide(
        policy, algorithm.needs, params, learner.reference, batch.replace(feedback=None), phase.every,
        previous, phase.record_experts, policies.get("target"),
    )  # fmt: skip
    if "previous" in policies:
        policies["previous"] = replaced(policies["previous"], state.params)
    if rule is not None and phase.turn is not None and phase.before is not None:
        batch = _after_turn(batch, phase.before, np.int32(phase.turn + 1), clip=rule.clip)
    experts = batch.experts  # which no transform reads, nor copies
    memory, batch = prepare(algorithm.transform, memory, batch.replace(feedback=feedback, experts=None))
    batch = batch.replace(experts=experts)
    if phase.turn is not None:  # only now, since advantages are those of all turns
        batch = _at_turn(batch, np.int32(phase.turn))
    objective = algorithm.objective if phase.objective is None else phase.objective
    state, metrics = update(
        policy, objective, learner.optimizer, state, batch, steps, only=only, frozen=learner.frozen,
        balance=learner.balance,
    )  # fmt: skip
    return LearnedBatch(state, memory, batch, steps, metrics, policies)


def replaced(previous: Params, params: Params) -> Params:
    """A copy of the parameters, without a critic, in the place of what `previous` takes, so that there is one copy."""
    if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(previous)):  # shapes: programs are only compiled
        return previous
    jax.tree.map(lambda x: x.delete(), previous)
    return jax.tree.map(jnp.copy, {name: params[name] for name in previous})


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


def _trained(batch: Trajectories) -> np.ndarray | None:
    """The rows that the update takes, where info["measured"] marks others that only `provide` reads; None: all."""
    marks = (batch.info or {}).get("measured")
    measured: Any = np.zeros(0, bool) if marks is None else np.asarray(marks) > 0
    return np.flatnonzero(~measured) if measured.any() else None


def fill_up(batch: Trajectories, rows: int, group_size: int, measured: int = 0) -> Trajectories:
    """The batch with groups without any action, up to `rows` rows, so that all steps share a compiled update.

    They are copies of the first rows' prompts, count in no mean, and leave loss and gradient as they are. Only where
    there are more minibatches than groups with actions can a gradient step see nothing but such. measured: how many of
    them, at the end, count as rows that no update takes, in a batch with info["measured"].
    """
    have = batch.tokens.shape[0]
    if have == rows:
        return batch
    index = np.concatenate([np.arange(have), np.arange(rows - have) % min(group_size, have)])
    empty = np.arange(rows) >= have
    numbers = np.asarray(batch.group).max() + 1 + (np.arange(rows) - have) // group_size
    batch = map_rows(lambda x: np.asarray(x)[index], batch)
    if measured:
        marks = np.where(empty, 0, np.asarray(batch.need("measured"))).astype(np.float32)
        marks[rows - measured :] = 1
        batch = batch.with_info(measured=jnp.asarray(marks))
    before = np.cumsum(np.asarray(batch.action_mask), axis=1) == 0
    return batch.replace(
        token_mask=batch.token_mask & (before | ~empty[:, None]),
        action_mask=batch.action_mask & ~empty[:, None],
        turn=np.where(empty[:, None], -1, batch.turn).astype(np.int32),
        group=np.where(empty, numbers, np.asarray(batch.group)).astype(np.int32),
    )
