"""Transforms of rewards before credit assignment: grades, ranks, rescaling, budgets, and exclusion of rows.

Scaling by running moments is `advantages.normalisation.running_reward_scaling`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from jaxrl_llm.core.counted_rows import without_rows
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories, bucket_sums
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


def useful_range(value: jax.Array, low: float | jax.Array, high: float | jax.Array) -> jax.Array:
    """clip((value - low)/(high - low), 0, 1): a score rescaled to the range in which it distinguishes samples."""
    return jnp.clip((value - low) / (high - low), 0.0, 1.0)


def graded(correct: jax.Array, flawed: jax.Array, penalty: float | jax.Array = 1.0) -> jax.Array:
    """+1 for correct, 1 - penalty for correct with a flawed derivation, -1 for wrong; f32[N] (FAPO, 2510.22543)."""
    return jnp.where(correct, 1.0 - penalty * flawed, -1.0)


def flawed_rows(batch: Trajectories) -> jax.Array:
    """bool[N]: info "flawed" if present, else component "sound" <= 0.5 if present (NaN counts as sound), else False."""
    if (flawed := (batch.info or {}).get("flawed")) is not None:
        return flawed.astype(bool)
    sound = (batch.rewards or {}).get("sound")
    return jnp.zeros(batch.group.shape, bool) if sound is None else sound <= 0.5


def likelihood_rank(likelihood: jax.Array, group: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Rank of each sample in its group, 0 for the most likely, and the size of the group, f32[N] each.

    likelihood: f32[N], NaN to exclude a sample. Equal samples share the mean of their ranks.
    """
    known = ~jnp.isnan(likelihood)
    mates = (group[:, None] == group) & known[:, None] & known
    above = jnp.sum(mates & (likelihood > likelihood[:, None]), axis=1)
    same = jnp.sum(mates & (likelihood == likelihood[:, None]), axis=1)
    (size,) = bucket_sums(group, known.astype(jnp.float32))
    return above + 0.5 * jnp.maximum(same - 1.0, 0.0), size


def rank_penalty(
    reward: jax.Array,
    likelihood: jax.Array,
    group: jax.Array,
    coefficient: float | jax.Array = 0.25,
    offset: float | jax.Array = 0.0,
) -> jax.Array:
    """r_i (1 - coefficient (G - offset - rank_i)/G), f32[N]: lower for more likely samples (2506.02355).

    rank and G: see `likelihood_rank`. offset 0 also penalises the least likely sample, offset 1 does not.
    """
    rank, size = likelihood_rank(jnp.where(jnp.isnan(reward), jnp.nan, likelihood), group)
    return reward * (1 - coefficient * (size - offset - rank) / jnp.maximum(size, 1))


def budget_level(tokens: jax.Array, max_length: float | jax.Array, scale: float | jax.Array = 4.0) -> jax.Array:
    """scale cos(pi tokens / (2 max_length)): `scale` for 0 tokens, 0 for max_length tokens."""
    return scale * jnp.cos(jnp.pi * tokens / (2 * max_length))


def budget_reward(
    lengths: jax.Array,
    budget: jax.Array,
    max_length: float | jax.Array,
    scale: float | jax.Array = 4.0,
    slope: float | jax.Array = 0.0,
    flat: bool = True,
) -> jax.Array:
    """Reward of a correct completion of n tokens whose prompt stated a budget b, f32[N] (HBPO, 2507.15844).

    With c = `budget_level`: c(n) - slope |n - b| for b < n <= max_length, c(b) for n <= b, and 0 above max_length.
    flat=False: min(c(n) - slope |n - b|, c(b)) on both sides, which penalises completions shorter than the budget too.
    """
    level = budget_level(budget, max_length, scale)
    over = budget_level(lengths, max_length, scale) - slope * jnp.abs(lengths - budget)
    held = jnp.where(lengths > budget, over, level) if flat else jnp.minimum(over, level)
    return jnp.where(lengths <= max_length, held, 0.0)
