"""One iteration of learning: a scored batch in, new parameters out; as runs call it, and compiled ahead of time.

`provide` computes what a method needs beyond a sampled and scored batch (`jaxrl_llm.needs`) from the policies at hand.
Batches can be filled up to one size (`fill_up`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, Sharding

from jaxrl_llm.algorithms import Algorithm
from jaxrl_llm.distributed.fully_sharded import fully_sharded
from jaxrl_llm.distributed.mesh import on_rows, replicate, to_device, to_mesh
from jaxrl_llm.distributed.programs import Program, ahead_of_time, compiled, computed, place
from jaxrl_llm.errors import InputError, shown
from jaxrl_llm.learner.checks import check_alive, check_rows
from jaxrl_llm.learner.previous import replaced
from jaxrl_llm.learner.steps import Steps, by_slices, check_steps, plan_steps
from jaxrl_llm.learner.teacher import from_teacher, under_teacher
from jaxrl_llm.learner.update import TrainState, init_state, prepare, update
from jaxrl_llm.models.check import check_params
from jaxrl_llm.models.hooked import of_a_reference
from jaxrl_llm.models.outputs import NOTHING, Wanted, affinity, policy_outputs, wanted_of
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.models.placement import row_shards
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.routing import routing_of
from jaxrl_llm.needs import need_of, of_previous, of_reference, value_of
from jaxrl_llm.references import Mixture
from jaxrl_llm.trajectory import PolicyOutputs, Trajectories, map_rows
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
    reference: Params | Mixture | None = None  # of the reference policy, where the method needs one
    frozen: Params | None = None  # the parameters that never learn, where some do not
    previous: Params | None = None  # that learn, before the last update, where the method needs them


class LearnedBatch(NamedTuple):
    """What an iteration gives."""

    state: TrainState
    memory: Any  # of the algorithm's transform
    batch: Trajectories  # as the transform prepared it, on the devices
    steps: Steps
    metrics: Metrics
    previous: Params | None = None  # for the next iteration: the parameters before this update, without a critic


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


def _rows_of(policy: Policy, batch: Trajectories) -> Sharding | None:
    """The sharding of a batch's rows on the policy's mesh; None without one, and where it does not divide them."""
    mesh = policy.mesh
    return None if mesh is None or batch.tokens.shape[0] % row_shards(mesh) else on_rows(mesh)


@compiled(results=lambda given: _rows_of(given.policy, given.batch), static_argnames=("policy", "wanted"))
def outputs_of(
    policy: Policy,
    params: Params,
    batch: Trajectories,
    steps: Steps | None = None,
    wanted: Wanted = NOTHING,
) -> PolicyOutputs:
    """`policy_outputs`, compiled; with the steps of an update one slice after another, as they do.

    Parameters in the host's memory are on the device for the time of the call.
    """
    params = to_device(params)
    found = by_slices(lambda part, packing: policy_outputs(policy, params, part, packing, wanted), batch, steps)
    rows = _rows_of(policy, batch)
    return found if rows is None else jax.lax.with_sharding_constraint(found, rows)


@compiled(static_argnames=("policy",))
def _affinity(policy: Policy, params: Params, reference: Params, batch: Trajectories, steps: Steps | None) -> jax.Array:
    reference = to_device(reference)
    return by_slices(lambda part, packing: affinity(policy, params, reference, part, packing), batch, steps)


@compiled(static_argnames=("function",))
def _of_states(function: Callable[[jax.Array, jax.Array], jax.Array], hidden: jax.Array, mask: jax.Array) -> jax.Array:
    return function(hidden, mask)


_under_teacher, _from_teacher = compiled()(under_teacher), compiled()(from_teacher)


@compiled(static_argnames=("function",))
def _of_logp(
    function: Callable[[jax.Array, Trajectories], jax.Array], logp: jax.Array, batch: Trajectories
) -> jax.Array:
    return function(logp, batch)


@dataclass(frozen=True)
class _Models:
    """`needs.Models` of a batch: one forward pass for all that is read of a policy."""

    policy: Policy
    params: Params
    of_reference: Params | Mixture | None
    of_previous: Params | None
    batch: Trajectories
    steps: Steps | None
    wanted: Wanted

    @cached_property
    def old(self) -> PolicyOutputs:
        return outputs_of(self.policy, self.params, self.batch, self.steps, self.wanted)

    @cached_property
    def reference(self) -> PolicyOutputs:
        reference = self._reference
        policy, batch = of_a_reference(self.policy, self.batch.replace(experts=None))  # its router is its own
        if not isinstance(reference, Mixture):
            return outputs_of(policy, reference, batch, self.steps)
        found = [outputs_of(policy, params, batch, self.steps) for params in reference.policies]
        return PolicyOutputs(
            logp=sum(share * one.logp for share, one in zip(reference.shares, found, strict=True)),
            entropy=jnp.zeros_like(found[0].entropy),  # that of a mixture is not known
        )

    @cached_property
    def previous(self) -> PolicyOutputs:
        assert self.of_previous is not None  # `provide` checks it
        policy, batch = of_a_reference(self.policy, self.batch.replace(experts=None))
        return outputs_of(policy, self.of_previous, batch, self.steps)

    @cached_property
    def teacher(self) -> PolicyOutputs:
        tokens, reference = (self.batch.info or {}).get("teacher_tokens"), self._reference
        if tokens is None:
            return self.old
        if isinstance(reference, Mixture):
            raise InputError("a teacher is one reference policy, but this one is a mixture of several")
        ids = (self.old.extras or {})["top_tokens"]
        policy, taught = of_a_reference(self.policy, _under_teacher(self.batch, tokens, ids))
        unpacked = None if self.steps is None else self.steps.replace(packing=None)
        found = outputs_of(policy, reference, taught, unpacked, Wanted(("top_logp",), top=ids.shape[-1]))
        return _from_teacher(self.batch, tokens, found)

    @cached_property
    def affinity(self) -> jax.Array:
        reference = self._reference
        if isinstance(reference, Mixture):
            raise InputError("reference_affinity needs one reference policy, but this one is a mixture of several")
        return _affinity(self.policy, self.params, reference, self.batch, self.steps)

    def of_states(self, function: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        return _of_states(function, (self.old.extras or {})["hidden"], self.batch.action_mask)

    def of_logp(self, function: Callable[[jax.Array, Trajectories], jax.Array]) -> jax.Array:
        return _of_logp(function, self.old.logp, self.batch)

    @property
    def _reference(self) -> Params | Mixture:
        assert self.of_reference is not None  # `provide` checks it
        return self.of_reference


def provide(
    policy: Policy,
    needs: frozenset[str],
    params: Params,
    reference: Params | Mixture | None,
    batch: Trajectories,
    steps: Steps | None = None,
    previous: Params | None = None,
    record_experts: bool = False,
) -> Trajectories:
    """Fill in the needs that have a `compute`: one forward pass for each policy, whatever is read of it.

    params: the weights before the update. reference: those of the reference policy, and previous the weights
    before the last update; InputError where they are needed and None. Other needs are the loop's, or the rollouts', to
    provide. With the update's `steps` the batch goes through a policy as it does in the update, slice by slice.
    record_experts: of a mixture, also fill in the experts that the routers of `params` choose in that pass
    (`batch.experts`), for the update to replay; experts that the batch has are replaced.

    Raises InputError, too, for parameters of another model, token ids beyond the vocabulary, and steps that were
    planned for another batch.
    """
    check_rows(policy, batch)
    if isinstance(needs, str) or not all(isinstance(need, str) for need in needs):
        raise InputError(f"needs is {shown(needs)}, but must be a set of names, such as an algorithm's `needs`")
    check_alive("a parameter", params, "Go on from the state that the update gave back")
    check_params(policy, params)
    if reference is not None:
        for one in reference.policies if isinstance(reference, Mixture) else (reference,):
            check_alive("a parameter of the reference policy", one, "Keep a copy that no update takes")
            check_params(policy, one, needs_other=False)
    if previous is not None:
        check_alive("a parameter of the previous policy", previous, "Keep a copy that no update takes")
        check_params(policy, previous, needs_other=False)
    if steps is not None:
        check_steps(steps, batch)
    if of_reference(needs) and reference is None:
        raise InputError("this method needs a reference policy, but none is loaded")
    if of_previous(needs) and previous is None:
        raise InputError("this method needs the weights before the last update: give a copy of them, previous=...")
    wanted = wanted_of(needs)
    if record_experts:
        wanted, batch = wanted._replace(names=(*wanted.names, "experts")), batch.replace(experts=None)
    models = _Models(policy, params, reference, previous, batch, steps, wanted)
    for text in sorted(needs):
        (_, number), need = value_of(text), need_of(text)
        if need.compute is not None:
            batch = need.put(batch, need.compute(models, models.batch, number), number)
    return batch.replace(experts=(models.old.extras or {})["experts"]) if record_experts else batch


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
    learner's previous parameters.

    batch: scored, on the host, with the last update's metrics as `feedback` where there are some. seed: of the order of
    rows; see `plan_steps`. objective: instead of the algorithm's. only: the one entry of the parameters that learns; by
    default all do. Of a mixture of experts the algorithm's `routing` is replayed; InputError where the batch lacks the
    experts that it was sampled with.
    """
    policy, algorithm, mesh = learner.policy, learner.algorithm, learner.mesh
    routing = routing_of(algorithm.routing, policy, batch)
    trained, slices = _trained(batch), learner.minibatches * learner.micro_batches
    steps = plan_steps(
        batch, epochs=learner.epochs, minibatches=learner.minibatches, micro_batches=learner.micro_batches, seed=seed,
        mesh=mesh, rows=trained,
    )  # fmt: skip
    every = steps
    if trained is not None:  # slices as long as those of the update, over all rows
        times = len(batch.tokens) / len(trained)
        every = plan_steps(batch, micro_batches=slices * (int(times) if times.is_integer() else 1), mesh=mesh)
    batch = to_mesh(batch, mesh)
    params, feedback = combine(learner.frozen, state.params), batch.feedback
    # Without the feedback, which no policy reads: there is none before the first update, and then another program.
    previous = None if learner.previous is None else combine(learner.frozen, learner.previous)
    batch = provide(
        policy, algorithm.needs, params, learner.reference, batch.replace(feedback=None), every, previous,
        routing == "recompute",
    )  # fmt: skip
    if learner.previous is not None:
        previous = replaced(learner.previous, state.params)
    experts = batch.experts  # which no transform reads, nor copies
    memory, batch = prepare(algorithm.transform, memory, batch.replace(feedback=feedback, experts=None))
    batch = batch.replace(experts=experts)
    objective = algorithm.objective if objective is None else objective
    state, metrics = update(policy, objective, learner.optimizer, state, batch, steps, only=only, frozen=learner.frozen)
    return LearnedBatch(state, memory, batch, steps, metrics, previous)


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

    They are copies of the first group's prompt, count in no mean, and leave loss and gradient as they are. Only where
    there are more minibatches than groups with actions can a gradient step see nothing but such. measured: how many of
    them, at the end, count as rows that no update takes, in a batch with info["measured"].
    """
    have = batch.tokens.shape[0]
    if have == rows:
        return batch
    index = np.concatenate([np.arange(have), np.arange(rows - have) % group_size])
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
