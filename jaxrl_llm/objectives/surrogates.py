"""Surrogates: from ratio and advantage to the value of a token, whose gradient improves the policy.

Those named *_value or *_weight work on plain arrays of any shape; the others make a `Surrogate` of them.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.errors import require
from jaxrl_llm.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.transform import Metrics

# (ratio f32[N, L], outputs, batch) -> (value to maximise f32[N, L], per-token statistics to average).
# The batch's advantages are 0 where a token does not count, so a surrogate need not mask anything.
Surrogate = Callable[[jax.Array, PolicyOutputs, Trajectories], tuple[jax.Array, Metrics]]


def clipped_value(ratio: jax.Array, advantages: jax.Array, low: jax.Array | float, high: jax.Array | float):
    """min(rho A, clip(rho, 1 - low, 1 + high) A) (PPO, 1707.06347); elementwise.

    >>> print(clipped_value(jnp.array([1.5, 1.5]), jnp.array([1.0, -1.0]), 0.2, 0.2))
    [ 1.2 -1.5]
    """
    return jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - low, 1 + high) * advantages)


def clip_fractions(ratio: jax.Array, advantages: jax.Array, low: jax.Array | float, high: jax.Array | float) -> Metrics:
    """Statistics: the tokens whose gradient the clip cut, below and above."""
    return {
        "clip/low": ((ratio < 1 - low) & (advantages < 0)).astype(jnp.float32),
        "clip/high": ((ratio > 1 + high) & (advantages > 0)).astype(jnp.float32),
    }


def clip(low: float = 0.2, high: float = 0.2, dual: float | None = None) -> Surrogate:
    """PPO's clipped surrogate; a higher `high` is DAPO's clip-higher. Both at least 0, low at most 1.

    dual > 1 bounds the loss of bad actions that became likely: max(value, dual * A) where A < 0 (1912.09729).
    """
    require("clip low", low, least=0, most=1)
    require("clip high", high, least=0)
    require("dual clip", dual, above=1)

    def surrogate(ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        A = batch.need("advantages")
        value = clipped_value(ratio, A, low, high)
        if dual is not None:
            value = jnp.where(A < 0, jnp.maximum(value, dual * A), value)
        return value, clip_fractions(ratio, A, low, high)

    return surrogate


def unclipped() -> Surrogate:
    """rho A: the importance-weighted policy gradient."""
    return lambda ratio, outputs, batch: (ratio * batch.need("advantages"), {})


def log_probability(weight: Callable[[jax.Array, Trajectories], jax.Array] | None = None) -> Surrogate:
    """sg(w) A log pi: the score function weighted by w = `weight(ratio, batch)` under stop-gradient (default 1).

    With w = rho the gradient is that of rho A. The value of the loss says nothing; its gradient does.
    """

    def surrogate(ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        w = jnp.ones_like(ratio) if weight is None else jax.lax.stop_gradient(weight(ratio, batch))
        counts = batch.loss_weights != 0
        return w * batch.need("advantages") * jnp.where(counts, outputs.logp, 0.0), {"weight/mean": w}

    return surrogate
