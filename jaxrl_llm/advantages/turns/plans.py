"""Credit of plans: generalised advantages of turns within subgoals, and of subgoals among each other (HiPER).

Arrays are [N, K] of N rows and K turns. A segment is a run of turns with one subgoal: it begins with the first turn and
with each turn that switches. Three heads of the critic have values of their own: 0 of the action, 1 of the subgoal, 2
of the decision to keep or switch.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxrl_llm.advantages.normalisation import moments
from jaxrl_llm.advantages.turns.turns import turn_count, turn_mask, turn_numbers
from jaxrl_llm.core.trajectory import Array, Trajectories

KEEP, SWITCH, SUBGOAL, NEW_SUBGOAL, ACTION = 1, 2, 3, 4, 5  # of info["plan"], see `rollouts.agents.plans`


def in_turns(mask: Array, batch: Trajectories) -> Array:
    """bool[N, K]: the turns with a token of the mask bool[N, L]."""
    return first_places(mask, batch) < batch.tokens.shape[1]


def first_places(mask: Array, batch: Trajectories) -> Array:
    """int32[N, K]: the place of each turn's first token of the mask; L where it has none."""
    L, turns = batch.tokens.shape[1], turn_count(batch)
    number = turn_numbers(batch)
    places = jnp.where(mask & (number >= 0), jnp.arange(L), L)
    own = number[:, :, None] == jnp.arange(turns)
    return jnp.min(jnp.where(own, places[:, :, None], L), axis=1).astype(jnp.int32)


def said(batch: Trajectories, kind: int) -> Array:
    """bool[N, K]: the turns with a token of this kind."""
    known = (batch.info or {}).get("plan")
    return jnp.zeros(turn_mask(batch).shape, bool) if known is None else in_turns(known == kind, batch)


def standardised(values: Array, mask: Array) -> Array:
    """(x - mean) / (deviation + 1e-8) over the mask, whose deviation is the population's; 0 outside of it."""
    mean, variance = moments(values, mask, 0)
    return jnp.where(mask, (values - mean) / (jnp.sqrt(variance) + 1e-8), 0.0)
