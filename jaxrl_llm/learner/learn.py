"""One iteration of learning: a scored batch in, new parameters out; as runs call it, and compiled ahead of time."""

from __future__ import annotations

from typing import Any, NamedTuple

import optax
from jax.sharding import Mesh

from jaxrl_llm.algorithms import Algorithm
from jaxrl_llm.distributed.ahead_of_time import Program, ahead_of_time, computed
from jaxrl_llm.distributed.mesh import replicate, to_mesh
from jaxrl_llm.learner.provide import provide
from jaxrl_llm.learner.steps import Steps, plan_steps
from jaxrl_llm.learner.update import TrainState, init_state, prepare, update
from jaxrl_llm.models.lora import combine
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.trajectory import Trajectories
from jaxrl_llm.transform import Metrics, Objective, RunFacts


class Learner(NamedTuple):
    """What all iterations have in common."""

    policy: Policy
    algorithm: Algorithm
    optimizer: optax.GradientTransformation
    mesh: Mesh
    epochs: int = 1
    minibatches: int = 1
    micro_batches: int = 1
    reference: Params | None = None  # of the reference policy, where the method needs one
    frozen: Params | None = None  # the parameters that never learn, where some do not


class LearnedBatch(NamedTuple):
    """What an iteration gives."""

    state: TrainState
    memory: Any  # of the algorithm's transform
    batch: Trajectories  # as the transform prepared it, on the devices
    steps: Steps
    metrics: Metrics


def start(
    algorithm: Algorithm, optimizer: optax.GradientTransformation, params: Params, facts: RunFacts | None, mesh: Mesh
) -> tuple[TrainState, Any]:
    """The state before the first update, and the memory of the algorithm's transform; whole on every device."""
    # Everything is on the mesh from the start: a step over arrays of another placement would be compiled again.
    make = lambda params: (init_state(params, optimizer), algorithm.transform.init(facts))  # noqa: E731
    return replicate(computed(make, params), mesh)


def learn_batch(
    learner: Learner,
    state: TrainState,
    memory: Any,
    batch: Trajectories,
    seed: Any = 0,
    objective: Objective | None = None,
    only: str | None = None,
) -> LearnedBatch:
    """Plan the gradient steps, put the batch on the mesh, provide, prepare, update. The state is donated.

    batch: scored, on the host, with the last update's metrics as `feedback` where there are some. seed: of the order of
    rows; see `plan_steps`. objective: instead of the algorithm's. only: the one entry of the parameters that learns; by
    default all do.
    """
    policy, algorithm, mesh = learner.policy, learner.algorithm, learner.mesh
    steps = plan_steps(
        batch, epochs=learner.epochs, minibatches=learner.minibatches, micro_batches=learner.micro_batches, seed=seed,
        mesh=mesh,
    )  # fmt: skip
    batch = to_mesh(batch, mesh)
    params, feedback = combine(learner.frozen, state.params), batch.feedback
    # Without the feedback, which no policy reads: there is none before the first update, and then another program.
    batch = provide(policy, algorithm.needs, params, learner.reference, batch.replace(feedback=None), steps)
    memory, batch = prepare(algorithm.transform, memory, batch.replace(feedback=feedback))
    objective = algorithm.objective if objective is None else objective
    state, metrics = update(policy, objective, learner.optimizer, state, batch, steps, only=only, frozen=learner.frozen)
    return LearnedBatch(state, memory, batch, steps, metrics)


def compile_learning(
    learner: Learner, params: Params, batch: Trajectories, facts: RunFacts | None = None
) -> list[Program]:
    """The programs of an iteration, in their order, compiled for the learner's mesh, whose devices need not be there.

    params: shapes of the parameters that learn; the learner's other parameters are shapes too. batch: numbers on the
    host, as rollouts give them: how long its rows are decides the shapes.
    """
    with ahead_of_time() as programs:
        params, reference, frozen = replicate((params, learner.reference, learner.frozen), learner.mesh)
        learner = learner._replace(reference=reference, frozen=frozen)
        state, memory = start(learner.algorithm, learner.optimizer, params, facts, learner.mesh)
        learn_batch(learner, state, memory, batch)
    return programs
