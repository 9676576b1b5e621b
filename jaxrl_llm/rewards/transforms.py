"""Transforms of rewards before credit assignment: grades, ranks, rescaling, budgets, and exclusion of rows.

Scaling by running moments is `advantages.normalisation.running_reward_scaling`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from jaxrl_llm.core.counted_rows import without_rows
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import Transform, stateless


@part
def rescore(reward: Callable[[Trajectories], jax.Array], needs: Iterable[str] = ()) -> Transform:
    """Replace the combined reward by `reward(batch)` f32[N], computed from `needs`. Rows without a score keep NaN."""
    return stateless(lambda b: b.replace(reward=jnp.where(jnp.isnan(b.scores), jnp.nan, reward(b))), needs)


@part
def leave_out(rows: Callable[[Trajectories], jax.Array], needs: Iterable[str] = ()) -> Transform:
    """Exclude rows bool[N], found from `needs`, from statistics (no score) and from the loss (weight 0).

    Averages over all rows with an action (`objectives.constant`) still count them.
    """

    return stateless(lambda batch: without_rows(batch, rows(batch)), needs)
