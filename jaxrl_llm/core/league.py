"""Earlier policies of a run that a rollout plays against: the first one, and snapshots that are taken on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core.arguments.checks import check_fields
from jaxrl_llm.core.arguments.ranges import Count
from jaxrl_llm.core.repr import layout
from jaxrl_llm.utils.errors import InputError

Params = Any
LEAGUE = "league"  # the entry of its parameters


@dataclass(frozen=True, repr=False)
class League:
    """Which policies are kept beside the one that learns, in places from 0 to size - 1.

    size: of them, at least 2. The first policy keeps place 0, and stands in the others until they are taken. every:
    updates from one snapshot to the next, which take the places 1, 2, ... size - 1, 1, 2 ... Each takes the memory of
    the weights that learn, of adapters alone with LoRA.
    """

    size: Count = 8
    every: Count = 20

    def __post_init__(self) -> None:
        check_fields(self)
        if self.size < 2:
            raise InputError("a league has a size of 2 at least: the first policy, and a snapshot")

    __repr__ = layout

    def place(self, updates: jax.Array) -> jax.Array:
        """int32[]: where the policy after so many updates goes, from 1 to size - 1; `size`, which is no place, where it
        is not kept."""
        kept = (updates > 0) & (updates % self.every == 0)
        return jnp.where(kept, 1 + (updates // self.every - 1) % (self.size - 1), self.size)

    def update(self, kept: Sequence[Params], params: Params, updates: jax.Array) -> tuple[Params, ...]:
        """The policies after so many updates, of which the last gave `params`."""
        place = self.place(updates)
        return tuple(
            jax.tree.map(lambda old, new, taken=place == number: jnp.where(taken, new, old), one, params)
            for number, one in enumerate(kept)
        )
