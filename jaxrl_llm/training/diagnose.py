"""Which part of an update was the first not to be finite."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.errors import InputError
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.training.provide import DURING_UPDATE, outputs_of, wanted_of
from jaxrl_llm.training.steps import Steps, take
from jaxrl_llm.training.update import gradient
from jaxrl_llm.trajectory import Trajectories
from jaxrl_llm.transform import Objective


class NotFiniteError(InputError):
    """A loss or gradient was NaN or infinite; nothing was changed by it."""


def _bad(tree: Any) -> str | None:
    """Path of the first array that holds a number which is not finite."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        if jnp.issubdtype(leaf.dtype, jnp.floating) and not bool(jnp.all(jnp.isfinite(leaf))):
            return jax.tree_util.keystr(path, simple=True, separator="/")
    return None


def not_finite(policy: Policy, objective: Objective, params: Params, batch: Trajectories, steps: Steps) -> str:
    """Name the first component that is not finite, along the data's way to the gradient.

    Rewards may be NaN (not scored); what is made of them may not. Runs the forward and backward pass once more.
    """
    if (name := _bad(params)) is not None:
        return f"the parameter {name}"
    for name in ("behaviour_logp", "old_logp", "reference_logp", "advantages", "weights"):
        value = getattr(batch, name)
        if value is not None and _bad(jnp.where(batch.loss_weights != 0, value, 0.0)) is not None:
            return f"the batch's {name}"
    wanted, (rows, packings) = wanted_of(objective.needs, DURING_UPDATE), steps.slices
    outputs = outputs_of(policy, params, batch, None, wanted, steps.slices)
    if (name := _bad({"log-probabilities": outputs.logp, "entropies": outputs.entropy})) is not None:
        return f"the policy's {name}"
    loss, metrics = objective(outputs, batch)
    if not bool(jnp.isfinite(loss)):
        return f"the loss ({_bad(metrics) or 'with all its metrics finite'})"
    grads, _ = jax.jit(gradient, static_argnums=(0, 1))(
        policy, objective, params, take(batch, rows.reshape(-1)), layout=packings
    )
    return f"the gradient of {_bad(grads) or 'the whole (its norm overflows)'}"
