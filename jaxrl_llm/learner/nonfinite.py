"""Names the first part of an update that was not finite, for the error's message."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import Objective
from jaxrl_llm.learner.microbatches import Steps
from jaxrl_llm.learner.moments import stays_finite, with_moments
from jaxrl_llm.learner.outputs import outputs_of
from jaxrl_llm.learner.train_state import TrainState
from jaxrl_llm.learner.update import gradient
from jaxrl_llm.models.outputs import DURING_UPDATE, wanted_of
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.utils.errors import InputError


class NotFiniteError(InputError):
    """A loss, a gradient, or a parameter or moment after it was NaN or infinite; that gradient step was not taken."""


@jax.jit
def _finite(tree: Any) -> jax.Array:
    floats = [x for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
    return jnp.stack([jnp.all(jnp.isfinite(x)) for x in floats] or [jnp.bool_(True)])


def not_finite_in(tree: Any) -> str | None:
    """The name (path) of the first array that holds a number which is not finite, or None.

    For parameters and moments before they are saved. One pass over them, on their devices.
    """
    flags = iter(jax.device_get(_finite(tree)).tolist())
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not next(flags):
            return _name(path)
    return None


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator="/")


def not_finite(
    policy: Policy,
    objective: Objective,
    params: Params,
    batch: Trajectories,
    steps: Steps,
    *,
    state: TrainState | None = None,
    optimizer: optax.GradientTransformation | None = None,
    frozen: Params | None = None,
    only: str | None = None,
) -> str:
    """Name the first component that is not finite, in the order of computation: batch, outputs, loss, gradient, update.

    params: the policy's. state, optimizer, frozen, only: of the update, where they are known; the state as the update
    left it. Rewards may be NaN (not scored); what is computed from them may not. Runs the passes once more.
    """
    if (name := not_finite_in(params)) is not None:
        return f"the parameter {name}"
    for name in ("behaviour_logp", "old_logp", "reference_logp", "previous_logp", "advantages", "weights"):
        value = getattr(batch, name)
        if value is not None and not_finite_in(jnp.where(batch.loss_weights != 0, value, 0.0)) is not None:
            return f"the batch's {name}"
    if state is not None:
        frozen = with_moments(policy, objective.needs, frozen, state.optimizer)
        params = combine(frozen, params)
    outputs = outputs_of(policy, params, batch, steps, wanted_of(objective.needs, DURING_UPDATE))
    if (name := not_finite_in({"log-probabilities": outputs.logp, "entropies": outputs.entropy})) is not None:
        return f"the policy's {name}"
    learning = params if state is None else state.params
    grad_fn = jax.jit(gradient, static_argnums=(0, 1))
    in_order = steps.in_order
    for number in range(in_order.rows.shape[0]):
        slices = jax.tree.map(lambda x, i=number: x[i], in_order)
        grads, metrics = grad_fn(policy, objective, learning, batch, slices, frozen)
        if not bool(jnp.isfinite(metrics.pop("loss"))):
            return f"the loss ({not_finite_in(metrics) or 'with all its metrics finite'})"
        if (name := not_finite_in(grads)) is not None:
            return f"the gradient of {name}"
        if not bool(jnp.isfinite(optax.tree.norm(grads))):
            return "the gradient of the whole (its norm overflows)"
        if state is not None and optimizer is not None:
            grads = jax.tree.map(lambda g, p: g.astype(p.dtype), grads, learning)
            of_step = jax.jit(stays_finite, static_argnums=(0, 4))
            flags = jax.device_get(of_step(optimizer, grads, state.optimizer, state.params, only))
            all_of = [(kind, path, good) for kind, tree in zip(("parameter", "moment"), flags, strict=True)
                      for path, good in jax.tree_util.tree_leaves_with_path(tree)]  # fmt: skip
            if (name := next((f"{kind} {_name(path)}" for kind, path, good in all_of if not good), None)) is not None:
                return f"the updated {name} (by this learning rate, weight decay or epsilon)"
    return "the loss or gradient of a minibatch at the parameters before it"


def refusal(step: int, what: str, finite: float, steps: Steps) -> str:
    """The beginning of the message of a NotFiniteError, true for any number of gradient steps.

    step: of the run, from 1. what: as `not_finite` says. finite: the share of the gradient steps that were taken.
    """
    number = steps.rows.shape[0] * steps.rows.shape[1]
    left = max(number - round(finite * number), 1)
    begin = f"step {step}: {what} is not finite"
    if number == 1:
        return f"{begin}; the parameters were not changed by it"
    verb = "was" if left == 1 else "were"
    return f"{begin}; {left} of its {number} gradient steps {verb} not taken, and nothing of step {step} is saved"
