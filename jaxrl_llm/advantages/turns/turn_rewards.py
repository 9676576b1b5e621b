"""Parts for methods of multi-turn credit: terms that a run may go without, and rewards of turns."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.returns import PerRow
from jaxrl_llm.advantages.turns.turns import TURNS, OfTurns, rewards_of_turns, turn_mask
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.core.transform import Transform, stateless
from jaxrl_llm.utils.errors import InputError, require_choice

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
def between_turns(gamma: float) -> PerRow:
    """A function `batch -> f32[N, L]`: gamma from the last action of a turn to the next turn, else 1 (POAD)."""
    check_number("gamma", gamma, least=0, most=1)

    def discounts(batch: Trajectories) -> Array:
        turn = jnp.where(batch.action_mask, batch.turn, 2**30)
        following = jnp.pad(jax.lax.cummin(turn, axis=1, reverse=True), ((0, 0), (0, 1)), constant_values=2**30)[:, 1:]
        return jnp.where(batch.action_mask & (following == batch.turn), 1.0, gamma)

    return discounts


@part
def needs_turns(fresh: bool = False) -> Transform:
    """Need episodes of several turns; the batch stays as it is. fresh: each turn is a row with a prompt of its own."""
    return stateless(lambda batch: batch, TURNS | ({"fresh_prompts"} if fresh else set()))


@part
def shared_turn_rewards(success: float = 0.0, most: int | None = None) -> Transform:
    """Divide the rewards of an episode's turns by their number: n of them that are positive if the episode is won, else
    `most`, the most that its task can give.

    An episode is won if the reward of its last turn, the score included, is above `success`. most None: the turns that
    the batch has room for. A batch without rewards of turns stays as it is.
    """
    check_number("most", most, least=1, whole=True, or_none=True)

    def divide(batch: Trajectories) -> Trajectories:
        if batch.turn_rewards is None:
            return batch
        mask, rewards = turn_mask(batch), rewards_of_turns(batch)
        number = jnp.where(mask, jnp.arange(mask.shape[1]), -1)
        last = mask & (number == number.max(axis=1, keepdims=True))
        won = jnp.sum(jnp.where(last, rewards, 0.0), axis=1) > success
        own = jnp.where(mask, jnp.nan_to_num(batch.turn_rewards), 0.0)
        count = jnp.where(won, jnp.sum(own > 0, axis=1), mask.shape[1] if most is None else most)
        return batch.replace(turn_rewards=own / jnp.maximum(count, 1)[:, None])

    return stateless(divide, {"turn_rewards"})


@part
def turn_rewards_at_the_end() -> Transform:
    """Add the rewards of an episode's turns to its score, which comes with its last turn."""

    def add(batch: Trajectories) -> Trajectories:
        if batch.turn_rewards is None:
            return batch
        own = jnp.sum(jnp.where(turn_mask(batch), jnp.nan_to_num(batch.turn_rewards), 0.0), axis=1)
        return batch.replace(reward=batch.scores + own, turn_rewards=jnp.zeros_like(batch.turn_rewards))

    return stateless(add)


@part
def gated_rewards(thresholds: tuple[float, ...], levels: tuple[str, ...] = ()) -> Transform:
    """Count a reward only where all of higher priority are above their thresholds (G-RA).

    levels: components of the reward, the highest first, whose gated sum replaces the score; () for the score alone. The
    rewards of turns are below them all. InputError for a level that is no component.
    """

    def gate(batch: Trajectories) -> Trajectories:
        if unknown := [name for name in levels if name not in (batch.rewards or {})]:
            raise InputError(f"the reward has no component {unknown[0]!r}: name those of the run's reward functions")
        parts = [(batch.rewards or {})[name] for name in levels] or [batch.scores]
        values = [jnp.nan_to_num(one) for one in parts]
        passed, total = jnp.ones(batch.scores.shape, bool), jnp.zeros(batch.scores.shape)
        for value, threshold in zip(values, thresholds, strict=True):
            total = total + jnp.where(passed, value, 0.0)
            passed = passed & (value > threshold)
        batch = batch.replace(reward=jnp.where(jnp.isnan(batch.scores), jnp.nan, total))
        if batch.turn_rewards is None:
            return batch
        return batch.replace(turn_rewards=jnp.where(passed[:, None], batch.turn_rewards, 0.0))

    return stateless(gate, {"turn_rewards"})
