"""A log barrier that keeps components of the reward above a share of what they were at the start."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.arguments.choices import Number


def barrier(slack: jax.Array, floor: Number = 1e-3) -> jax.Array:
    """log slack, continued below `floor` along its tangent, so that its derivative does not vanish there.

    >>> print([f"{x:.3f}" for x in barrier(jnp.array([1.0, 0.001, 0.0]))])
    ['0.000', '-6.908', '-7.908']
    """
    return jnp.log(jnp.maximum(slack, floor)) + jnp.minimum(slack - floor, 0.0) / floor
