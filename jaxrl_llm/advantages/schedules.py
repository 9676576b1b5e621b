"""Numbers that change with the step of the run: fading from a start value to 0, and going straight between two values.

Steps may be arrays; they count from 0. `total` is the number of steps of the run.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.coefficients import check_number
from jaxrl_llm.errors import require_choice

Number = jax.Array | float
SHAPES = ("linear", "power", "sigmoid")


def progress(step: Number, total: Number, start: Number = 0.0, end: Number = 1.0) -> jax.Array:
    """p = clip((step - S0) / (S1 - S0), 0, 1) with S0 = floor(start * total), S1 = floor(end * total)."""
    first, last = (jnp.floor(jnp.asarray(share) * total + 1e-4) for share in (start, end))
    return jnp.clip((step - first) / jnp.maximum(last - first, 1e-6), 0.0, 1.0)


def fade(
    done: Number, magnitude: Number = 1.0, shape: str = "linear", power: Number = 2.0, slope: Number = 8.0
) -> jax.Array:
    """From `magnitude` at progress `done` = 0 to 0 at 1 (RLVR-Schedule, 2605.25381).

    linear M (1 - p); power (M (1 - p))^power; sigmoid M (f(p - 1/2) - f(1/2)) / (f(-1/2) - f(1/2)) with
    f(z) = 1 / (1 + exp(slope z)).

    >>> print(fade(jnp.array([0.0, 0.25, 1.0]), 1.0, "power"))
    [1.     0.5625 0.    ]
    """
    require_choice("shape", shape, SHAPES)
    check_number("magnitude", magnitude, least=0)
    left = magnitude * (1.0 - jnp.asarray(done))
    if shape == "linear":
        return left
    if shape == "power":
        return left**power
    low, here, high = (jax.nn.sigmoid(-slope * z) for z in (0.5, jnp.asarray(done) - 0.5, -0.5))
    return magnitude * (here - low) / (high - low)


def ramp(step: Number, total: Number, first: Number, last: Number) -> jax.Array:
    """From `first` at step 0 in a straight line to `last` at step `total` and after."""
    return first + (last - first) * progress(step, total)
