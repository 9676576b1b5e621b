"""Combinations of reward components beyond a weighted sum, as functions of a batch for `transforms.rescore`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.utils.errors import unknown


def component_of(batch: Trajectories, name: str) -> jax.Array:
    """A component of the reward, f32[N]; InputError for an unknown name."""
    if name not in (batch.rewards or {}):
        raise unknown("reward component", name, batch.rewards or {})
    return (batch.rewards or {})[name].astype(jnp.float32)


def other_components(batch: Trajectories, *names: str) -> list[jax.Array]:
    """The components of the reward without these, f32[N] each, in the order of their names."""
    return [x.astype(jnp.float32) for name, x in sorted((batch.rewards or {}).items()) if name not in names]
