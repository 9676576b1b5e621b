"""One iteration of learning: a scored batch in, new parameters out.

`inputs.provide` computes what a method needs beyond a sampled and scored batch from the policies at hand.
Batches can be filled up to one size (`full_size.fill_up`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl_llm.core.algorithm import Algorithm, TurnPhases
from jaxrl_llm.core.reference import Mixture
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import Metrics, Objective
from jaxrl_llm.distributed.mesh import to_mesh
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.learner.microbatches import Steps, plan_steps
from jaxrl_llm.learner.router_balance import RouterBalance
from jaxrl_llm.learner.teacher import FrozenPolicy, Teachers, with_head
from jaxrl_llm.learner.train_state import TrainState
from jaxrl_llm.learner.turnwise_updates import alone_at, by_turns, factor_after, phase_count, without_factor
from jaxrl_llm.learner.update import prepare, update
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
    marks = (batch.info or {}).get("measured")
    slices = learner.minibatches * learner.micro_batches
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
    return by_turns(_learn, learner, state, memory, to_mesh(batch, mesh), phase, algorithm.phases, count)


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
        policies["previous"] = _replaced(policies["previous"], state.params)
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


def _replaced(previous: Params, params: Params) -> Params:
    """A copy of the parameters, without a critic, in the place of what `previous` takes, so that there is one copy."""
    if not all(isinstance(x, jax.Array) for x in jax.tree.leaves(previous)):  # shapes: programs are only compiled
        return previous
    jax.tree.map(lambda x: x.delete(), previous)
    return jax.tree.map(jnp.copy, {name: params[name] for name in previous})
