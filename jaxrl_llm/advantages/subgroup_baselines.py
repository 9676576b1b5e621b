"""Credit and averages that tell apart rows of one prompt by an entry of `info`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import uniform_groups
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories, joint_key
from jaxrl_llm.core.transform import Transform


@part
def within_kinds(name: str, credit: Transform) -> Transform:
    """A transform for which rows of a group with different info[name] f32[N] are different groups.

    Rows without the entry (NaN) count as 0; a batch without it has its own groups. Needs `name`.
    """

    def apply(state: Any, batch: Trajectories) -> tuple[Any, Trajectories]:
        kind = (batch.info or {}).get(name)
        if kind is None:
            return credit.apply(state, batch)
        groups = joint_key(batch.group, jnp.nan_to_num(kind))
        state, out = credit.apply(state, batch.replace(group=groups))
        return state, out.replace(group=batch.group)

    return Transform(credit.init, apply, credit.needs | {name})


def uniform_among_others(batch: Trajectories) -> jax.Array:
    """bool[N]: rows of groups whose rewards are all equal; none of them if there is no other group."""
    uniform = uniform_groups(batch)
    informative = ~uniform & ~jnp.isnan(batch.scores)
    return uniform & jnp.any(informative)


@part
def lower_where(name: str, factor: float) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N]`: the factor where info[name] is 1, else 1."""

    def weight(batch: Trajectories) -> jax.Array:
        marked = (batch.info or {}).get(name)
        return jnp.ones(batch.group.shape) if marked is None else jnp.where(marked == 1, factor, 1.0)

    return weight
