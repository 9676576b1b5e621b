"""The learning half of a step as a notebook calls it: prepare a scored batch, update the parameters.

optimizer = optax.adam(1e-5)
state, memory = init_state(params, optimizer), None
for step in range(10):
    batch = sample(policy, state.params, prompts, jax.random.fold_in(key, step), group_size=8)
    memory, batch = prepare(mine, memory, score(batch, reward, rows, tokenizer), policy, state.params)
    state, metrics = update(policy, mine, optimizer, state, batch)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import optax

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.arguments.checks import expect
from jaxrl_llm.core.needs import need_of, of_reference
from jaxrl_llm.core.shapes import check_batch
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import Metrics, Objective, Transform
from jaxrl_llm.learner import update as programs
from jaxrl_llm.learner.checks import check_finite
from jaxrl_llm.learner.inputs import provide
from jaxrl_llm.learner.microbatches import plan_steps
from jaxrl_llm.learner.step import as_sampled
from jaxrl_llm.learner.train_state import TrainState
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.utils.errors import InputError


def prepare(
    algorithm: Algorithm | Transform,
    memory: Any,
    batch: Trajectories,
    policy: Policy | None = None,
    params: Params | None = None,
    reference: Params | None = None,
    feedback: Mapping[str, Any] | None = None,
    previous: Params | None = None,
    target: Params | None = None,
) -> tuple[Any, Trajectories]:
    """The algorithm's memory and the batch after its transform: with advantages, and all that its objective reads.

    memory: what the last call gave, None before the first. batch: scored. policy, params: as the batch was sampled
    with; required where the algorithm needs log-probabilities, values or the like of them. reference: parameters of the
    policy that a KL penalty keeps close to; an update takes its state's memory, so keep a copy (`jax.tree.map(jnp.copy,
    params)`). feedback: the metrics of the last update, for algorithms that adapt to them. previous: a copy of the
    parameters before the last update (at first the initial ones), for algorithms that need previous_logp. target: those
    of the target critic (at first a copy of params["critic"], then what `algorithm.target.update` gives), for those
    that need target_values.

    Raises InputError where the algorithm needs something that is not given, and for advantages that are not finite.
    """
    if not isinstance(algorithm, Transform):
        expect("what prepares a batch", algorithm, Algorithm)
    transform = algorithm if isinstance(algorithm, Transform) else algorithm.transform
    check_batch(batch)
    batch.need("reward")
    computed = sorted(need for need in algorithm.needs if need_of(need).compute is not None)
    if computed and (policy is None or params is None):
        raise InputError(f"the algorithm needs {', '.join(computed)}: give the policy and params to compute them with")
    if of_reference(algorithm.needs) and reference is None:
        raise InputError("the algorithm needs a reference policy: give its parameters, reference=...")
    for need in map(need_of, sorted(algorithm.needs)):
        if need.provider is not None and need.of(batch) is None:
            raise InputError(f"the algorithm needs {need.name} ({need.meaning}), but the batch has no {need.where}")
    if computed and policy is not None and params is not None:
        batch = provide(policy, algorithm.needs, params, reference, batch, previous=previous, target=target)
    if feedback is not None and "feedback" in algorithm.needs:
        known = {"updates": 1.0, **feedback}
        batch = batch.replace(feedback={name: jnp.float32(value) for name, value in known.items()})
    memory, batch = programs.prepare(transform, transform.init() if memory is None else memory, batch)
    check_finite("the advantages", batch.advantages, batch.action_mask)
    return memory, batch


def update(
    policy: Policy,
    algorithm: Algorithm | Objective,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: Trajectories,
    *,
    epochs: int = 1,
    minibatches: int = 1,
    micro_batches: int = 1,
    seed: int | Sequence[int] = 0,
) -> tuple[TrainState, Metrics]:
    """Take gradient steps on a prepared batch: the new state, and the metrics' means over the steps.

    state: from `init_state(params, optimizer)`, then what the last call gave; its arrays are used up. epochs: passes
    over the batch, each of `minibatches` gradient steps, whose gradients are sums over `micro_batches`. seed: of the
    order of groups. Prompts that rows share are computed once. This is `learner.update.update` over the steps of
    `learner.microbatches.plan_steps`, as `train` calls them.

    Raises InputError for arguments that do not fit each other.
    """
    if not isinstance(algorithm, Objective):
        expect("what is minimised", algorithm, Algorithm)
        policy = as_sampled(policy, algorithm)
    objective = algorithm if isinstance(algorithm, Objective) else algorithm.objective
    mesh = getattr(policy, "mesh", None)
    steps = plan_steps(
        batch, epochs=epochs, minibatches=minibatches, micro_batches=micro_batches, seed=seed, mesh=mesh,
        runs=policy.config.recurrent,
    )  # fmt: skip
    return programs.update(policy, objective, optimizer, state, batch, steps)
