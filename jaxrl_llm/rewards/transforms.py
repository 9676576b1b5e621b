"""Transforms of rewards before credit assignment: rescoring, shaping by length, and exclusion of rows.

Scaling by running moments is `advantages.normalisation.running_reward_scaling`.
"""

import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp

from jaxrl_llm.core.arguments.ranges import Count
from jaxrl_llm.core.parts import Trajectories, Transform, batch_part, part, stateless
from jaxrl_llm.core.trajectory import without_rows
from jaxrl_llm.utils.errors import InputError, unknown


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


@batch_part
def paid_for_calls(batch: Trajectories, bonus: float, calls: int = 1, success: float = -math.inf) -> jax.Array:
    """A function `batch -> f32[N]`: the scores, plus the bonus of a success with so many calls of tools that worked."""
    made, failed = ((batch.info or {}).get(name) for name in ("calls", "failed_calls"))
    if made is None or failed is None:
        return batch.scores
    enough = jnp.nan_to_num(made) - jnp.nan_to_num(failed) >= calls
    return batch.scores + bonus * (enough & (batch.scores > success))


def component_of(batch: Trajectories, name: str) -> jax.Array:
    """A component of the reward, f32[N]; InputError for an unknown name."""
    if name not in (batch.rewards or {}):
        raise unknown("reward component", name, batch.rewards or {})
    return (batch.rewards or {})[name].astype(jnp.float32)


def other_components(batch: Trajectories, *names: str) -> list[jax.Array]:
    """The components of the reward without these, f32[N] each, in the order of their names."""
    return [x.astype(jnp.float32) for name, x in sorted((batch.rewards or {}).items()) if name not in names]


def overlong_penalty(lengths: jax.Array, max_tokens: int, buffer: int) -> jax.Array:
    """0 up to max_tokens - buffer, then falling linearly to -1 at max_tokens (DAPO, arXiv 2503.14476, eq. 13).

    lengths: tokens of each completion, any shape.

    >>> overlong_penalty(jnp.array([70, 80, 90, 100]), max_tokens=100, buffer=20).tolist()
    [0.0, 0.0, -0.5, -1.0]
    """
    return jnp.clip((max_tokens - buffer - lengths) / buffer, -1.0, 0.0)


def row_lengths(batch: Trajectories) -> jax.Array:
    """f32[N]: number of actions of each row."""
    return batch.lengths


@part
def soft_overlong_penalty(
    max_tokens: Count, buffer: Count, lengths: Callable[[Trajectories], jax.Array] = row_lengths
) -> Transform:
    """Add `overlong_penalty` to the combined reward. InputError unless 0 < buffer <= max_tokens.

    lengths: batch -> f32[N], of each row by default; `algorithms.agents.grpo_tcr.episode_lengths` for several.
    """
    if buffer > max_tokens:
        raise InputError(f"soft_overlong_penalty: buffer is {buffer}, but must be from 1 to max_tokens ({max_tokens})")

    def add(batch: Trajectories) -> Trajectories:
        if batch.reward is None:
            raise InputError("the batch has no rewards: score it before adding the overlong penalty")
        return batch.replace(reward=batch.reward + overlong_penalty(lengths(batch), max_tokens, buffer))

    return stateless(add)
