"""A critic of several heads, each with returns of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.returns import needed_values
from jaxrl_llm.core.arguments.ranges import Positive
from jaxrl_llm.core.parts import Metrics, Objective, PolicyOutputs, Trajectories, control, part
from jaxrl_llm.objectives.values import clipped_error, half_square
from jaxrl_llm.utils.errors import InputError


@part
def head_value_loss(heads: int, clip: Positive | None = 0.2) -> Objective:
    """sum_h mean over the tokens that train head h of 1/2 (V_h - R_h)^2, or its clipped form (`clipped_error`).

    R: info["head_returns"] f32[N, L, H], NaN where a head is not trained. The control "head_turns" f32[H] is how many
    there are in the whole batch, such as `algorithms.turn_credit.hiper.hierarchical_advantages` writes. Metrics:
    "value/loss", "value/error" (mean |V - R| over all heads), and "value/explained_variance" from before the update.
    """

    def objective(outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        new, old = (outputs.extras or {}).get("values"), batch.need("values")
        if new is None:
            raise InputError("the value loss needs outputs.extras['values']: give the policy a critic (models.critic)")
        returns, counts = batch.need("head_returns"), control(batch, "head_turns")
        trained = ~jnp.isnan(returns) & (batch.loss_weights != 0)[..., None]
        V, V_old, R = (jnp.where(trained, x, 0.0) for x in (new, old, returns))
        error = half_square(V - R) if clip is None else clipped_error(V, V_old, R, clip)
        loss = jnp.sum(jnp.sum(error, axis=(0, 1)) / jnp.maximum(counts, 1))
        away = jnp.sum(jnp.abs(V - R)) / jnp.maximum(jnp.sum(counts), 1)
        metrics = {"value/loss": loss, "value/error": away}
        if (explained := (batch.controls or {}).get("explained_variance")) is not None:
            share = jnp.sum(trained) / jnp.maximum(jnp.sum(counts), 1)  # the slices of a batch add up to 1
            metrics["value/explained_variance"] = explained * share
        return loss, metrics

    return Objective(objective, needed_values(heads))
