"""Schedules over the steps of a run: decay from a start value to 0, and linear interpolation between two values.

Steps may be arrays and count from 0. `total` is the number of steps of the run.
"""

from typing import Literal, get_args

import jax
import jax.numpy as jnp

from jaxrl_llm.core.annotations import Number, check_number
from jaxrl_llm.utils.errors import require_choice

Shape = Literal["linear", "power", "sigmoid"]


def progress(step: Number, total: Number, start: Number = 0.0, end: Number = 1.0) -> jax.Array:
    """p = clip((step - S0) / (S1 - S0), 0, 1) with S0 = floor(start * total), S1 = floor(end * total)."""
    first, last = (jnp.floor(jnp.asarray(share) * total + 1e-4) for share in (start, end))
    return jnp.clip((step - first) / jnp.maximum(last - first, 1e-6), 0.0, 1.0)


def fade(
    done: Number, magnitude: Number = 1.0, shape: Shape = "linear", power: Number = 2.0, slope: Number = 8.0
) -> jax.Array:
    """Decay from `magnitude` at progress p = `done` = 0 to 0 at p = 1 (RLVR-Schedule, 2605.25381).

    linear M (1 - p); power (M (1 - p))^power; sigmoid M (f(p - 1/2) - f(1/2)) / (f(-1/2) - f(1/2)) with
    f(z) = 1 / (1 + exp(slope z)).

    >>> print(fade(jnp.array([0.0, 0.25, 1.0]), 1.0, "power"))
    [1.     0.5625 0.    ]
    """
    require_choice("shape", shape, get_args(Shape))
    check_number("magnitude", magnitude, least=0)
    left = magnitude * (1.0 - jnp.asarray(done))
    if shape == "linear":
        return left
    if shape == "power":
        return left**power
    low, here, high = (jax.nn.sigmoid(-slope * z) for z in (0.5, jnp.asarray(done) - 0.5, -0.5))
    return magnitude * (here - low) / (high - low)


def ramp(step: Number, total: Number, first: Number, last: Number) -> jax.Array:
    """Interpolate linearly from `first` at step 0 to `last` at step `total`, then stay there."""
    return first + (last - first) * progress(step, total)
