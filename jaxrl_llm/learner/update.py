"""The update: a batch of trajectories in, new parameters out; one compiled program for all its gradient steps."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.core.arguments.checks import expect
from jaxrl_llm.core.needs import value_of
from jaxrl_llm.core.shapes import check_batch, in_words
from jaxrl_llm.core.trajectory import SAMPLED, SHARED, PolicyOutputs, Trajectories, map_rows, with_totals
from jaxrl_llm.core.transform import Metrics, Objective, Transform
from jaxrl_llm.distributed.aot import compiled
from jaxrl_llm.distributed.sharding import fully_sharded
from jaxrl_llm.learner.checks import check_alive, check_learning, check_optimizer_kind, check_rows, check_state
from jaxrl_llm.learner.microbatches import Slices, Steps, check_steps, take_rows
from jaxrl_llm.learner.moments import advanced, bounded, stays_finite, with_moments
from jaxrl_llm.learner.router_balance import (
    RouterBalance,
    balanced,
    check_balance,
    load_metrics,
    with_bias_steps,
    without_load,
)
from jaxrl_llm.learner.train_state import TrainState
from jaxrl_llm.models.layers.moe import Load
from jaxrl_llm.models.layers.parts import accumulation_dtype
from jaxrl_llm.models.mesh_axes import EXPERT, FSDP, TENSOR
from jaxrl_llm.models.outputs import DURING_UPDATE, policy_outputs, wanted_of
from jaxrl_llm.models.packed_states import LOAD
from jaxrl_llm.models.packing import Packing
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.utils.errors import InputError, unknown


@jax.named_scope("gradient")
def gradient(
    policy: Policy,
    objective: Objective,
    params: Params,
    batch: Trajectories,
    slices: Slices | None = None,
    frozen: Params | None = None,
    balance: RouterBalance | None = None,
) -> tuple[Params, Metrics]:
    """Gradient of the objective and its metrics ("loss" among them), accumulated over slices of the rows.

    slices: micro-batches, and how each lies in memory; rows that are in none are left out. None: the whole batch at
    once, every row as it is. params: the parameters that learn. frozen: the rest of the policy's (`parameters.combine`
    merges both), where these are a part; not differentiated. balance: of a mixture of experts, whose auxiliary loss is
    added and part of "loss"; the metrics then have the `moe.Load` of the minibatch, "router_load", beside numbers.

    The result does not depend on the slices: each carries the totals of all. Where an objective's refresh needs all
    rows of a minibatch, and slices do not hold the groups that it is about (`Objective.by_groups`), another forward
    pass comes before. Sums are kept in float32, whatever the dtype of the parameters. Raises InputError for arguments
    that do not fit each other.
    """
    check_rows(policy, batch)
    expect("the objective", objective, Objective)
    if slices is not None and not isinstance(slices, Slices):
        raise InputError(f"slices is {in_words(slices)}, but must be Slices, such as plan_steps(batch).slices")
    check_learning(policy, params, frozen)
    count = 1 if slices is None else slices.rows.shape[0]
    batch = with_totals(batch if slices is None else take_rows(batch, slices.rows.reshape(-1)))
    wanted = wanted_of(objective.needs, DURING_UPDATE)
    alone = count == 1 or (slices is not None and slices.together and objective.by_groups)
    if balance is not None:
        check_balance(balance, policy.config)
        wanted = wanted._replace(names=(*wanted.names, LOAD))

    def outputs_of(params: Params, part: Trajectories, packing: Packing | None) -> tuple[PolicyOutputs, Load | None]:
        return without_load(policy_outputs(policy, combine(frozen, params), part, packing, wanted))

    def loss(
        params: Params, part: Trajectories, packing: Packing | None, whole: Load | None = None
    ) -> tuple[jax.Array, Metrics]:
        outputs, load = outputs_of(params, part, packing)
        with jax.named_scope("objective"):
            value, metrics = (objective if alone else objective.function)(outputs, part)
        if balance is not None and load is not None:
            value, metrics = balanced(balance, (value, metrics), load, whole, policy.config)
        return value, {**diagnostics(outputs, part), **metrics, "loss": value}

    grad_fn = jax.grad(loss, has_aux=True)
    packings = None if slices is None else slices.packing
    if count == 1:
        return grad_fn(params, batch, jax.tree.map(lambda x: x[0], packings))

    def sliced(batch: Trajectories) -> Trajectories:
        """Arrays [count, n, ...] of rows [count * n, ...]."""
        return map_rows(lambda x: x.reshape(count, -1, *x.shape[1:]), batch).replace(**dict.fromkeys(SHARED))

    whole: Load | None = None
    if (objective.refresh is not None and not alone) or (balance is not None and balance.coefficient):
        # What needs the whole batch at the current parameters costs one more forward pass, also in slices.
        outputs, loads = jax.lax.map(lambda each: outputs_of(params, *each), (sliced(batch), packings))
        if not alone:
            batch = objective.refreshed(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), outputs), batch)
        whole = jax.tree.map(lambda x: jnp.sum(x, axis=0), loads)
    shared = {name: getattr(batch, name) for name in SHARED}
    parts = sliced(batch)

    def add(sums: tuple[Params, Metrics], each: tuple[Trajectories, Packing | None]) -> tuple[Any, None]:
        part, packing = each
        new = grad_fn(params, part.replace(**shared), packing, whole)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, new), None

    part, packing = jax.tree.map(lambda x: x[0], (parts, packings))
    shapes = jax.eval_shape(grad_fn, params, part.replace(**shared), packing, whole)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, accumulation_dtype(x.dtype)), shapes)
    return jax.lax.scan(add, zeros, (parts, packings))[0]


FIRST = ("mismatch", "off_prompt/mismatch")  # metrics of the first gradient step


def _check_update(given: Any) -> None:
    """InputError for what is wrong with the arguments of `update`, their values too where they can be read."""
    check_rows(given.policy, given.batch)
    expect("the objective", given.objective, Objective)
    check_optimizer_kind(given.optimizer)
    if given.frozen is not None and not isinstance(given.frozen, Mapping):
        raise InputError(f"frozen is {in_words(given.frozen)}, but must be parameters, a dictionary of arrays")
    if not isinstance(given.state, TrainState):
        raise InputError(f"the state is {in_words(given.state)}, but must be what init_state(params, optimizer) gives")
    check_alive("the state", given.state, "Go on from the state that this update gave back")
    check_alive("a frozen parameter", given.frozen, "Keep a copy of parameters that are needed after it")
    if given.steps is not None:
        check_steps(given.steps, given.batch)


@compiled(
    _check_update, static_argnames=("policy", "objective", "optimizer", "only", "balance"), donate_argnames=("state",)
)
def update(
    policy: Policy,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: Trajectories,
    steps: Steps | None = None,
    *,
    only: str | None = None,
    frozen: Params | None = None,
    balance: RouterBalance | None = None,
) -> tuple[TrainState, Metrics]:
    """Take the gradient steps on a prepared batch; compiled, and the state is donated.

    On a mesh with the axes "fsdp", "expert" or "tensor" the new state is sharded by `distributed.fully_sharded`.

    steps: which rows each gradient step takes, in which micro-batches, and how they lie in memory: `plan_steps` on the
    host, `draw_steps` under jit. None: one step on the whole batch, every row as it is.
    Metrics are f32[] means over the gradient steps ("mismatch", the mean absolute difference between the trainer's and
    the sampler's log-probabilities: of the first), with "grad_norm" before clipping and "finite", which is 0 where
    the loss, a gradient, or a parameter or moment after the step was not: such a step is not taken, and leaves
    parameters, moments and counter as they were, bit for bit. See `nonfinite.not_finite`.
    only: the one entry of the parameters that changes, e.g. "critic"; by default all do.
    frozen: the policy's parameters that never learn, where the state's are a part of them (see `gradient`): they have
    no gradient and no moments, and are not donated.
    balance: how the experts of a mixture are kept busy (`router_balance`), with the metrics "router/aux_loss" and
    "router/largest_share"; of a step with `only` it is left out.
    Raises InputError for token ids beyond the vocabulary, steps that were planned for another batch, parameters of
    another model, a state of another optimiser or one that was donated to an earlier update, and an unknown entry in
    `only`.
    """
    check_learning(policy, state.params, frozen)
    if only is not None and only not in state.params:
        raise unknown("entry of the parameters", only, state.params)
    check_state(optimizer, state.optimizer, state.params)
    balance = None if only is not None else balance
    if balance is not None:
        check_balance(balance, policy.config, frozen=bool({*(frozen or ())} - {"other", "teacher"}))

    def step(state: TrainState, slices: Slices | None) -> tuple[TrainState, Metrics]:
        fixed = with_moments(policy, objective.needs, frozen, state.optimizer)
        grads, metrics = gradient(policy, objective, state.params, batch, slices, fixed, balance)
        load: Any = metrics.pop(LOAD, None)
        metrics = of_own_tokens(metrics) | load_metrics(load)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"])
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
        if not bounded(optimizer, state.params):
            made = stays_finite(optimizer, grads, state.optimizer, state.params, only)
            finite &= jnp.all(jnp.stack(jax.tree.leaves(made)))

        @jax.named_scope("optimizer")
        def advance(state: TrainState, one: jax.Array | float) -> TrainState:
            updates, moments = optimizer.update(grads, state.optimizer, state.params)
            if only is not None:
                updates = {k: v if k == only else jax.tree.map(jnp.zeros_like, v) for k, v in updates.items()}
            params = optax.apply_updates(state.params, updates)
            if balance is not None and balance.bias_speed:
                params = with_bias_steps(params, load, policy.config, balance.bias_speed)
            return TrainState(params, moments, state.step + 1)

        state = advanced(advance, state, finite)
        if policy.mesh is not None and {FSDP, EXPERT, TENSOR} & set(policy.mesh.shape):
            state = jax.lax.with_sharding_constraint(state, fully_sharded(state, policy.config, policy.mesh))
        return state, {**metrics, "grad_norm": norm, "finite": finite.astype(jnp.float32)}

    in_order = None if steps is None else steps.in_order
    if in_order is None or in_order.rows.shape[0] == 1:
        return step(state, jax.tree.map(lambda x: x[0], in_order))
    state, metrics = jax.lax.scan(step, state, in_order)
    # Only before the first step are sampler and trainer the same policy.
    return state, {name: x[0] if name in FIRST else jnp.mean(x) for name, x in metrics.items()}


def _check_prepare(given: Any) -> None:
    expect("the transform", given.transform, Transform)
    check_batch(given.batch)
    for need in given.transform.needs:
        value_of(need)


@compiled(_check_prepare, static_argnames=("transform",))
def prepare(transform: Transform, memory: Any, batch: Trajectories) -> tuple[Any, Trajectories]:
    """Apply an algorithm's transform to a scored batch, compiled. InputError for what is no transform or no batch."""
    return transform.apply(memory, batch)


OWN = ("kl/behaviour", "mismatch")  # metrics of the difference between sampler and trainer


def diagnostics(outputs: PolicyOutputs, batch: Trajectories) -> Metrics:
    """Token means that are worth seeing whatever the objective."""
    weights = batch.loss_weights
    tokens = batch.totals["tokens"] if batch.totals else 1.0
    sampled = (batch.info or {}).get(SAMPLED, batch.behaviour_logp)
    difference = jnp.where(weights != 0, outputs.logp - sampled, 0.0)
    values = {
        "entropy": outputs.entropy,
        "kl/behaviour": jnp.expm1(jnp.clip(difference, -20, 20)) - difference,
        "mismatch": jnp.abs(difference),
    }
    if (marked := (batch.info or {}).get("off_prompt")) is not None:
        # Rows that were sampled under another prompt differ for that reason too.
        off = (marked == 1)[:, None] & (weights != 0)
        apart = {"off_prompt/mismatch": jnp.where(off, values["mismatch"], 0.0), "off_prompt/share": off + 0.0}
        values |= {name: jnp.where(off, 0.0, values[name]) for name in OWN} | apart
    return {name: jax.lax.stop_gradient(jnp.sum(x * weights) / tokens) for name, x in values.items()}


def of_own_tokens(metrics: Metrics) -> Metrics:
    """The metrics, where rows were sampled under another prompt: those of each kind as means over its tokens."""
    if "off_prompt/share" not in metrics:
        return metrics
    share = metrics["off_prompt/share"]
    own = {name: metrics[name] / jnp.maximum(1 - share, 1e-9) for name in OWN}
    return {**metrics, **own, "off_prompt/mismatch": metrics["off_prompt/mismatch"] / jnp.maximum(share, 1e-9)}
