"""The update: a batch of trajectories in, new parameters out; one compiled program for all its gradient steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.checks import (
    check_alive,
    check_count,
    check_key,
    check_learning,
    check_moments,
    check_only,
    check_optimizer_kind,
    check_rows,
)
from jaxrl_llm.learner.moments import bounded, in_place, stays_finite
from jaxrl_llm.learner.provide import DURING_UPDATE, wanted_of
from jaxrl_llm.learner.steps import Steps, check_steps, take
from jaxrl_llm.models.layers import accumulation_dtype
from jaxrl_llm.models.lora import combine
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.models.packing import Layout, Packing
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.trajectory import SHARED, PolicyOutputs, Trajectories, check_batch, in_words, map_rows, with_totals
from jaxrl_llm.transform import Metrics, Objective, Transform, expect

F = TypeVar("F")


class TrainState(NamedTuple):
    """What the update changes."""

    params: Params  # that learn; see `frozen` of `update` for the others
    optimizer: optax.OptState
    step: jax.Array  # int32[]: gradient steps taken


def init_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """A state that has taken no step. It shares the parameters' buffers.

    Raises InputError for parameters that are no floats or gone, and for what is no optimiser.
    """
    check_optimizer_kind(optimizer)
    if not isinstance(params, Mapping):
        raise InputError(f"the parameters are {in_words(params)}, but must be the dictionary that load_policy gives")
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(getattr(x, "dtype", None) or type(x), jnp.floating):
            name = jax.tree_util.keystr(path, simple=True, separator="/")
            raise InputError(f"the parameter {name} is {in_words(x)}, but must be an array of floats")
    check_alive("a parameter", params, "Keep a copy of parameters that are needed after it")
    return TrainState(params, optimizer.init(params), jnp.int32(0))


def gradient(
    policy: Policy,
    objective: Objective,
    params: Params,
    batch: Trajectories,
    micro_batches: int = 1,
    layout: Layout | Packing | None = None,
    frozen: Params | None = None,
) -> tuple[Params, Metrics]:
    """Gradient of the objective and its metrics ("loss" among them), accumulated over equal slices of the rows.

    layout: of every slice (see `policy_outputs`); a Packing has a first axis of micro-batches, which slice the rows in
    order, and `micro_batches` is not looked at.

    params: the parameters that learn. frozen: the rest of the policy's (`lora.combine` merges both), where these
    are a part; nothing is derived by them.

    The result does not depend on `micro_batches`: each slice carries the totals of the whole batch. Sums are kept in
    float32, whatever the parameters are. Raises InputError where the number of rows (of groups, with a layout) is not a
    multiple of `micro_batches`, and for arguments that do not fit each other.
    """
    check_rows(policy, batch)
    expect("the objective", objective, Objective)
    if layout is not None and not isinstance(layout, Layout | Packing):
        raise InputError(f"layout is {in_words(layout)}, but must be a Layout or a Packing")
    check_count("micro_batches", micro_batches)
    check_learning(policy, params, frozen)
    packings = layout if isinstance(layout, Packing) else None
    if packings is not None:
        micro_batches = packings.row.shape[0]
    _check_parts(batch, layout, "micro_batches", micro_batches)
    batch, wanted = with_totals(batch), wanted_of(objective.needs, DURING_UPDATE)

    def outputs_of(params: Params, part: Trajectories, lies: Packing | None) -> PolicyOutputs:
        return policy_outputs(policy, combine(frozen, params), part, layout if lies is None else lies, wanted)

    def loss(params: Params, part: Trajectories, lies: Packing | None) -> tuple[jax.Array, Metrics]:
        outputs = outputs_of(params, part, lies)
        value, metrics = (objective if micro_batches == 1 else objective.function)(outputs, part)
        return value, {**_diagnostics(outputs, part), **metrics, "loss": value}

    derive = jax.grad(loss, has_aux=True)
    if micro_batches == 1:
        return derive(params, batch, jax.tree.map(lambda x: x[0], packings))
    unit = layout.group_size if isinstance(layout, Layout) else 1
    split, join = _slices(micro_batches, unit if packings is None else None)
    nothing = dict.fromkeys(SHARED)
    if objective.refresh is not None:
        # What needs the whole batch at the current parameters costs one more forward pass, also in slices.
        slices = map_rows(split, batch).replace(**nothing)
        outputs = jax.lax.map(lambda each: outputs_of(params, *each), (slices, packings))
        batch = objective.refreshed(jax.tree.map(join, outputs), batch)
    shared = {name: getattr(batch, name) for name in SHARED}
    parts = map_rows(split, batch).replace(**nothing)

    def add(sums: tuple[Params, Metrics], each: tuple[Trajectories, Packing | None]) -> tuple[Any, None]:
        part, lies = each
        new = derive(params, part.replace(**shared), lies)
        return jax.tree.map(lambda a, b: a + b.astype(a.dtype), sums, new), None

    first, place = jax.tree.map(lambda x: x[0], (parts, packings))
    shapes = jax.eval_shape(derive, params, first.replace(**shared), place)
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, accumulation_dtype(x.dtype)), shapes)
    return jax.lax.scan(add, zeros, (parts, packings))[0]


def _slices(parts: int, unit: int | None) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """Functions that cut rows [N, ...] into [parts, N / parts, ...], and put them together again.

    unit: every `parts`-th unit of so many rows, so that rows spread over devices stay spread in each slice; None: in
    order.
    """
    if unit is None:
        return lambda x: x.reshape(parts, -1, *x.shape[1:]), lambda x: x.reshape(-1, *x.shape[2:])

    def split(x: jax.Array) -> jax.Array:
        x = x.reshape(-1, parts, unit, *x.shape[1:]).swapaxes(0, 1)
        return x.reshape(parts, -1, *x.shape[3:])

    def join(x: jax.Array) -> jax.Array:
        x = x.reshape(parts, -1, unit, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(-1, *x.shape[3:])

    return split, join


def _check_parts(batch: Trajectories, layout: Layout | Packing | None, name: str, parts: int) -> None:
    """InputError unless the rows (with a Layout: whole groups) split evenly into `parts`."""
    rows, group_size = batch.tokens.shape[0], layout.group_size if isinstance(layout, Layout) else 1
    if rows % (group_size * parts):
        groups = f" in groups of {group_size}" if isinstance(layout, Layout) else ""
        raise InputError(f"{rows} rows{groups} do not split evenly into {name} {parts}: change one of them")


def _diagnostics(outputs: Any, batch: Trajectories) -> Metrics:
    """Token means that are worth seeing whatever the objective."""
    weights, tokens = batch.loss_weights, batch.totals["tokens"] if batch.totals else 1.0
    difference = jnp.where(weights != 0, outputs.logp - batch.behaviour_logp, 0.0)
    values = {
        "entropy": outputs.entropy,
        "kl/behaviour": jnp.expm1(jnp.clip(difference, -20, 20)) - difference,
        "mismatch": jnp.abs(difference),
    }
    return {name: jax.lax.stop_gradient(jnp.sum(x * weights) / tokens) for name, x in values.items()}


@partial(
    jax.jit,
    static_argnames=("policy", "objective", "optimizer", "epochs", "minibatches", "micro_batches", "layout", "only"),
    donate_argnames=("state",),
)
def _update(
    policy: Policy,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: Trajectories,
    key: jax.Array | None = None,
    *,
    steps: Steps | None = None,
    epochs: int = 1,
    minibatches: int = 1,
    micro_batches: int = 1,
    layout: Layout | None = None,
    only: str | None = None,
    frozen: Params | None = None,
) -> tuple[TrainState, Metrics]:
    """`update` without its checks of values."""
    check_learning(policy, state.params, frozen)
    check_only(only, state.params)
    check_moments(optimizer, state.optimizer, state.params)
    if steps is None:
        orders, packings = _shuffled(batch, key, epochs, minibatches, layout), None
    else:
        orders, packings = steps.in_order
    whole = steps is None and minibatches == 1

    def step(state: TrainState, each: tuple[jax.Array, Packing | None]) -> tuple[TrainState, Metrics]:
        rows, packing = each
        part, how = batch if whole else take(batch, rows), layout if packing is None else packing
        grads, metrics = gradient(policy, objective, state.params, part, micro_batches, how, frozen)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(norm) & jnp.isfinite(metrics["loss"])
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, state.params)
        if not bounded(optimizer, state.params):
            made = stays_finite(optimizer, grads, state.optimizer, state.params, only)
            finite &= jnp.all(jnp.stack(jax.tree.leaves(made)))

        def advance(state: TrainState, one: jax.Array | float) -> TrainState:
            changes, moments = optimizer.update(grads, state.optimizer, state.params)
            if only is not None:
                changes = {k: v if k == only else jax.tree.map(jnp.zeros_like, v) for k, v in changes.items()}
            return TrainState(optax.apply_updates(state.params, changes), moments, state.step + 1)

        state = in_place(advance, state, finite)
        return state, {**metrics, "grad_norm": norm, "finite": finite.astype(jnp.float32)}

    if orders.shape[0] == 1:
        return step(state, jax.tree.map(lambda x: x[0], (orders, packings)))
    state, metrics = jax.lax.scan(step, state, (orders, packings))
    # Only before the first step are sampler and trainer the same policy.
    return state, {name: x[0] if name == "mismatch" else jnp.mean(x) for name, x in metrics.items()}


def _like(jitted: F) -> Callable[[Callable[..., Any]], F]:
    """Give a function in front of a jitted one the other's methods, to be compiled ahead of time by."""

    def decorate(function: Callable[..., Any]) -> F:
        for name in ("lower", "trace", "eval_shape", "clear_cache", "_cache_size"):
            setattr(function, name, getattr(jitted, name))
        return function  # type: ignore[return-value]

    return decorate


@_like(_update)
def update(
    policy: Policy,
    objective: Objective,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    batch: Trajectories,
    key: jax.Array | None = None,
    *,
    steps: Steps | None = None,
    epochs: int = 1,
    minibatches: int = 1,
    micro_batches: int = 1,
    layout: Layout | None = None,
    only: str | None = None,
    frozen: Params | None = None,
) -> tuple[TrainState, Metrics]:
    """Take epochs x minibatches gradient steps on a prepared batch; the state is donated.

    steps: which rows each gradient step takes, in which micro-batches, and how they lie in memory (`plan_steps`). Or
    without, under a trace: each epoch shuffles the rows (with a layout: the groups; one minibatch needs no shuffling)
    with `key` and splits them into `minibatches`, each a gradient step, accumulated over `micro_batches`.
    Metrics are f32[] means over the gradient steps ("mismatch", the mean absolute difference between the trainer's and
    the sampler's log-probabilities: of the first), with "grad_norm" before clipping and "finite", which is 0 where
    the loss, a gradient, or a parameter or moment that would come of them was not: such a step is not taken, and leaves
    parameters, moments and counter as they were, bit for bit. See `diagnose.not_finite`.
    only: the one entry of the parameters that changes, e.g. "critic"; by default all do.
    frozen: the policy's parameters that never learn, where the state's are a part of them (see `gradient`): they have
    no gradient and no moments, and are not donated.
    Raises InputError where the rows (with a layout: the groups) do not split evenly, for token ids beyond the
    vocabulary, steps that were planned for another batch, parameters of another model, a state of another optimiser or
    one that an earlier update took, an unknown entry in `only`, and counts below 1.
    """
    check_rows(policy, batch)
    expect("the objective", objective, Objective)
    check_optimizer_kind(optimizer)
    if layout is not None and not isinstance(layout, Layout):
        raise InputError(f"layout is {in_words(layout)}, but must be a Layout")
    if frozen is not None and not isinstance(frozen, Mapping):
        raise InputError(f"frozen is {in_words(frozen)}, but must be parameters, a dictionary of arrays")
    if not isinstance(state, TrainState):
        raise InputError(f"the state is {in_words(state)}, but must be what init_state(params, optimizer) gives")
    check_alive("the state", state, "Go on from the state that this update gave back")
    check_alive("a frozen parameter", frozen, "Keep a copy of parameters that are needed after it")
    counts = {"epochs": epochs, "minibatches": minibatches, "micro_batches": micro_batches}
    for name, count in counts.items():
        check_count(name, count)
        counts[name] = int(count)  # of other types they would be other programs
    if key is not None:
        check_key(key)
    if steps is not None:
        check_steps(steps, batch, **counts)
    return _update(
        policy, objective, optimizer, state, batch, key, steps=steps, layout=layout, only=only, frozen=frozen, **counts
    )


def _shuffled(
    batch: Trajectories, key: jax.Array | None, epochs: int, minibatches: int, layout: Layout | None
) -> jax.Array:
    """int32[epochs * minibatches, N / minibatches]: the rows of each gradient step."""
    _check_parts(batch, layout, "minibatches", minibatches)
    N = batch.tokens.shape[0]
    units = jnp.arange(N).reshape(N // layout.group_size if layout else N, -1)
    if minibatches == 1:
        return jnp.broadcast_to(units.reshape(1, -1), (epochs, N))
    if key is None:
        raise InputError("minibatches are of rows in random order: give a key, or steps that were planned")
    keys = jax.random.split(key, epochs)
    return jax.vmap(lambda key: jax.random.permutation(key, units))(keys).reshape(epochs * minibatches, -1)


@partial(jax.jit, static_argnames=("transform",))
def _prepare(transform: Transform, memory: Any, batch: Trajectories) -> tuple[Any, Trajectories]:
    return transform.apply(memory, batch)


@_like(_prepare)
def prepare(transform: Transform, memory: Any, batch: Trajectories) -> tuple[Any, Trajectories]:
    """Apply an algorithm's transform to a scored batch, compiled. InputError for what is no transform or no batch."""
    expect("the transform", transform, Transform)
    check_batch(batch)
    return _prepare(transform, memory, batch)
