"""A sampling temperature for each token by the level of its entropy: the same function samples and trains.

The level is relative to the entropies of the last batch, of which `Levels` has what is needed. It is array state of the
sampler, and is in each row of a batch (`ENTRIES` of its info), so that the update computes the distribution that was
sampled from. `BY_LEVEL` is the sampler's hook.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.core.hooks import State, by_temperature

Number = jax.Array | float


class Levels(NamedTuple):
    """The scale of entropy levels, and how much they change the temperature; numbers, or an array each."""

    pivot: Any = 0.0  # log-entropy of level 0
    deviation: Any = 1.0
    top: Any = 1.0  # of z = (log H - pivot) / deviation
    bottom: Any = -1.0
    tau: Any = 0.0  # 0: the temperature is the same for all tokens


ENTRIES = tuple(f"level_{name}" for name in Levels._fields)
"""Names of the numbers in a batch's controls and info."""


def temperature_factor(entropy: jax.Array, levels: Levels) -> jax.Array:
    """What multiplies the temperature of tokens with these entropies f32[...], at the usual temperature, without
    truncation; under stop-gradient. 1 where a level is NaN, as in groups that failed.
    """
    scale = jnp.stack(jnp.broadcast_arrays(*levels[:4]))
    factor = level_temperature(entropy_level(entropy, scale), 1.0, levels.tau)
    return jax.lax.stop_gradient(jnp.where(jnp.isnan(factor), 1.0, factor))


def _factor(entropy: jax.Array, state: State) -> jax.Array:
    return temperature_factor(entropy, Levels(*(state[name] for name in ENTRIES)))


BY_LEVEL = by_temperature(_factor, "heated", tuple(zip(ENTRIES, Levels(), strict=True)))
"""The hook of these temperatures; with `tau` 0, as before the first update, all tokens have the usual one."""


def log_entropy_scale(entropy: jax.Array, mask: jax.Array, pivot: Number = 0.8) -> jax.Array:
    """f32[4]: pivot q, RMS deviation from it, and max and min of z = (log H - q) / deviation (HAPO, 2509.16591).

    q is the quantile `pivot` of the log-entropies of the masked tokens, without interpolation.
    """
    x = jnp.where(mask, jnp.log(jnp.maximum(jnp.where(mask, entropy, 1.0), 1e-8)), jnp.inf).reshape(-1)
    n = jnp.sum(mask)
    index = jnp.clip(jnp.round(pivot * (n - 1)), 0, x.size - 1).astype(jnp.int32)
    q = jnp.where(n > 0, jnp.sort(x)[index], 0.0)
    distance = jnp.where(mask.reshape(-1), x - q, 0.0)
    deviation = jnp.sqrt(jnp.maximum(jnp.sum(distance**2) / jnp.maximum(n, 1), 1e-8))
    return jnp.stack([q, deviation, jnp.max(distance) / deviation, jnp.min(distance) / deviation])


def entropy_level(entropy: jax.Array, scale: jax.Array) -> jax.Array:
    """h = z / max z where z > 0, z / |min z| elsewhere: in [-1, 1] on the tokens that `scale` f32[4] describes."""
    q, deviation, top, bottom = scale
    z = (jnp.log(jnp.maximum(entropy, 1e-8)) - q) / deviation
    return jnp.where(z > 0, z / jnp.where(top > 0, top, 1.0), z / jnp.where(bottom < 0, -bottom, 1.0))


def level_temperature(level: jax.Array, base: Number = 1.0, tau: Number = 0.05) -> jax.Array:
    """Sampling temperature base (1 + tau clip(h, -1, 1)), h computed with the scale of the last batch (2509.16591)."""
    return base * (1.0 + tau * jnp.clip(level, -1.0, 1.0))
