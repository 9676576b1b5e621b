"""Clips with a range per token, and clips that scale rather than remove the gradient outside their range."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.core.kinds import AboveOne, Number, check_bounds
from jaxrl_llm.core.parts import Metrics, PolicyOutputs, Trajectories, part
from jaxrl_llm.objectives.surrogates import Surrogate, clip_fractions, clipped_value

Bounds = Callable[[Trajectories], tuple[Number, Number]]  # batch -> (low, high), the ratio's range [1 - low, 1 + high]


def bounded_loss(value: jax.Array, advantages: jax.Array, dual: Number | None) -> jax.Array:
    """max(value, dual A) where A < 0: the dual clip (1912.09729). None: off."""
    return value if dual is None else jnp.where(advantages < 0, jnp.maximum(value, dual * advantages), value)


def gradient_preserving_value(ratio: jax.Array, advantages: jax.Array, low: Number, high: Number) -> jax.Array:
    """min(rho A, clip(rho, 1 - low, (1 + high) rho / sg(rho)) A): above the range the gradient is scaled, not cut.

    Its value is that of the usual clip, its gradient F A grad log pi with F = 1 + high where rho > 1 + high and
    A > 0; 0 where rho < 1 - low and A < 0; else rho (AEPO, 2510.14545; the upper clip of GPPO, 2508.07629).
    """
    held = jax.lax.stop_gradient(ratio)
    upper = (1 + high) * ratio / held
    # Select the branch explicitly, because the gradient of a minimum is ambiguous at ties.
    return jnp.where(
        advantages > 0,
        jnp.where(held > 1 + high, upper, ratio) * advantages,
        jnp.where(held < 1 - low, 1 - low, ratio) * advantages,
    )


@part
def gradient_preserving_clip(low: float = 0.2, high: float | None = None, dual: AboveOne | None = None) -> Surrogate:
    """`gradient_preserving_value`, optionally with a dual clip. low in [0, 1], high >= 0 (default: low), dual > 1."""
    low, high = check_bounds("clip", low, high, most=1)

    def surrogate(ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        A = batch.need("advantages")
        value = bounded_loss(gradient_preserving_value(ratio, A, low, high), A, dual)
        return value, clip_fractions(ratio, A, low, high)

    return surrogate


@part
def token_clip(
    bounds: Bounds, dual: AboveOne | None = None, revise: Callable[..., jax.Array] | None = None
) -> Surrogate:
    """PPO's clip with the per-token range `bounds(batch)`; dual > 1 bounds the loss where A < 0.

    revise: `(advantages, sg(ratio), batch) -> advantages`, for credit that depends on the ratio.
    """

    def surrogate(ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        A, (low, high) = batch.need("advantages"), bounds(batch)
        if revise is not None:
            A = revise(A, jax.lax.stop_gradient(ratio), batch)
        return bounded_loss(clipped_value(ratio, A, low, high), A, dual), clip_fractions(ratio, A, low, high)

    return surrogate
