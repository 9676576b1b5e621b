"""Parts for methods of multi-turn credit: terms that a run may go without, and rewards of turns."""

from __future__ import annotations

import jax.numpy as jnp

from jaxrl_llm.advantages.turns.turns import TURNS, OfTurns, turn_mask
from jaxrl_llm.core.parts import Array, Trajectories, Transform, part, stateless
from jaxrl_llm.utils.errors import require_choice

FIELDS = ("state_key", "turn_rewards")


@part
def where_given(field: str, term: OfTurns, otherwise: OfTurns | None = None) -> OfTurns:
    """A term of turns that reads a field of the batch; without that field `otherwise`, by default 0.

    For methods that need the field: a run without it is refused unless it goes without by name.
    """
    require_choice("field", field, FIELDS)

    def advantage(batch: Trajectories) -> Array:
        if getattr(batch, field) is not None:
            return term(batch)
        return jnp.zeros(turn_mask(batch).shape) if otherwise is None else otherwise(batch)

    return advantage


@part
def needs_turns(fresh: bool = False) -> Transform:
    """Need episodes of several turns; the batch stays as it is. fresh: each turn is a row with a prompt of its own."""
    return stateless(lambda batch: batch, TURNS | ({"fresh_prompts"} if fresh else set()))
