"""Credit of turns by information: how probable they made the answer, and what their observations changed."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import above_baseline
from jaxrl_llm.advantages.multipliers import standard_scores, token_moments
from jaxrl_llm.advantages.returns import scored_actions
from jaxrl_llm.advantages.turns.turns import (
    OfTurns,
    above_buckets,
    on_tokens,
    returns_of_turns,
    turn_mask,
    turn_numbers,
)
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, Trajectories, bucket_moments


@part
def information_gains(gamma: float = 1.0, epsilon: float = 1e-6) -> OfTurns:
    """Advantages of turns: returns of gains of the answer's probability, and of the score, standardised together.

    The gain of a turn is p_{t+1} - p_t, p_t = exp of info["answer_logp"] before turn t; the last turn has the score
    instead. Standard scores (n - 1) are over all of these of the group; gains that are not known, without an answer,
    count as 0 after that and in no moment. Needs answer_logp.
    """
    check_number("gamma", gamma, least=0, most=1)

    def advantage(batch: Trajectories) -> Array:
        mask = turn_mask(batch)
        number = jnp.where(mask, jnp.arange(mask.shape[1]), -1)
        last = mask & (number == number.max(axis=1, keepdims=True))
        p = jnp.exp(batch.need("answer_logp"))
        gain = jnp.pad(p, ((0, 0), (0, 1)), constant_values=jnp.nan)[:, 1:] - p
        value = jnp.where(last, jnp.nan_to_num(batch.scores)[:, None], gain)
        known = mask & ~jnp.isnan(value)
        group = jnp.broadcast_to(batch.group[:, None], mask.shape)
        return returns_of_turns(above_buckets(value, group, known, "std", epsilon=epsilon), mask, gamma)

    return advantage


def feedback_gains(batch: Trajectories) -> Array:
    """f32[N, K]: of each turn, by how much its observation raised the mean log-probability of the next turn's tokens.

    It can be negative. 0 for the last turn, and where nothing was blanked. Reads old_logp and info["blanked_logp"].
    """
    mask, number = turn_mask(batch), turn_numbers(batch)
    change = batch.need("old_logp") - batch.need("blanked_logp")
    own = jax.nn.one_hot(jnp.where(batch.action_mask, number, -1), mask.shape[1])
    following = jnp.einsum("nl,nlk->nk", jnp.where(batch.action_mask, change, 0.0), own)
    following = following / jnp.maximum(jnp.sum(own, axis=1), 1)
    return jnp.where(mask, jnp.pad(following, ((0, 0), (0, 1)))[:, 1:], 0.0)


def lengths_of_turns(batch: Trajectories) -> Array:
    """f32[N, K]: the number of actions of each turn."""
    number = jnp.where(batch.action_mask, turn_numbers(batch), -1)
    return jnp.sum(jax.nn.one_hot(number, turn_mask(batch).shape[1]), axis=1)


def fused_with_feedback(batch: Trajectories, beta: float, temperature: float, epsilon: float) -> Array:
    """f32[N, L]: the advantages of `infopo`."""
    actions = scored_actions(batch)
    spread = bucket_moments(batch.group, batch.scores)[2]
    outcome = above_baseline(batch.scores, batch.group) / (spread + epsilon)
    outcome = jnp.where(actions, outcome[:, None], 0.0)
    shares = on_tokens(feedback_gains(batch) / jnp.maximum(lengths_of_turns(batch), 1), batch)
    own = standard_scores(shares, actions & (shares != 0), batch.group, 1, epsilon)
    one = jnp.zeros_like(batch.group)
    deviations = [token_moments(x, actions, one, 1)[2].max() for x in (outcome, own)]
    scale = jnp.where(deviations[1] > 0, jnp.maximum(deviations[0], 1.0) / jnp.maximum(deviations[1], 1e-12), 1.0)
    gate = jax.nn.sigmoid(-spread / temperature)[:, None]
    return outcome + beta * gate * jnp.minimum(scale, 1.0) * own
