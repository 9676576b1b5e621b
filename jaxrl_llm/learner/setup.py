"""The state before the first update, and the programs of an iteration compiled ahead of time."""

from concurrent.futures import Executor
from typing import Any

import jax
import optax
from jax.sharding import Mesh

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import RunFacts
from jaxrl_llm.distributed.aot import Program, ahead_of_time, computed, place
from jaxrl_llm.distributed.mesh import replicate
from jaxrl_llm.distributed.sharding import fully_sharded
from jaxrl_llm.learner.step import Learner, learn_batch
from jaxrl_llm.learner.train_state import TrainState, init_state
from jaxrl_llm.models.policy import Params, Policy


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
    learner: Learner,
    params: Params,
    batch: Trajectories,
    platform: str | None = None,
    beside: Executor | None = None,
) -> list[Program]:
    """The programs of an iteration, in their order, compiled for the learner's mesh, whose devices need not be there.

    params: shapes of the parameters that learn; the learner's other parameters are shapes too. batch: numbers on the
    host, as rollouts give them: how long its rows are decides the shapes. platform, beside: see `ahead_of_time`.
    """
    with ahead_of_time(platform, beside) as programs:
        params, reference, frozen = shard((params, learner.reference, learner.frozen), learner.policy, learner.mesh)
        learner = learner._replace(reference=reference, frozen=frozen)
        state, memory = start(learner.policy, learner.algorithm, learner.optimizer, params, None, learner.mesh)
        learn_batch(learner, state, memory, batch)
    return programs
