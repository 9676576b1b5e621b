"""Credit of plans: generalised advantages of turns within subgoals, and of subgoals among each other (HiPER).

Arrays are [N, K] of N rows and K turns. A segment is a run of turns with one subgoal: it begins with the first turn and
with each turn that switches. Three heads of the critic have values of their own: 0 of the action, 1 of the subgoal, 2
of the decision to keep or switch.
"""

from __future__ import annotations

import jax.numpy as jnp

from jaxrl_llm.advantages.normalisation import moments
from jaxrl_llm.core.trajectory import Array

KEEP, SWITCH, SUBGOAL, NEW_SUBGOAL, ACTION = 1, 2, 3, 4, 5  # of info["plan"], see `rollouts.agents.plans`


def standardised(values: Array, mask: Array) -> Array:
    """(x - mean) / (deviation + 1e-8) over the mask, whose deviation is the population's; 0 outside of it."""
    mean, variance = moments(values, mask, 0)
    return jnp.where(mask, (values - mean) / (jnp.sqrt(variance) + 1e-8), 0.0)
