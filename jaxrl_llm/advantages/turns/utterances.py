"""Credit of whole replies by a critic with values of states and of replies in them, and a target critic (ArCHer).

A turn is one step of a decision process: the state is the conversation before it, the action the whole reply. Heads 0
and 1 of the critic are Q_1 and Q_2 of a reply, read at its last token; heads 2 and 3 are V_1 and V_2 of the state, read
at the first token of the reply. A value depends on what comes before its token, so Q sees all of a reply but its last
token, which in a finished one only says that it ends.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.replayed import replayed_rows
from jaxrl_llm.advantages.returns import needed_values
from jaxrl_llm.advantages.turns.turns import (
    TURNS,
    acted_turns,
    on_tokens,
    rewards_of_turns,
    turn_count,
    turn_mask,
    turn_numbers,
)
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.core.transform import Transform, counted, stateless

HEADS = 4  # Q_1, Q_2, V_1, V_2


def ends_of_turns(batch: Trajectories) -> tuple[Array, Array]:
    """int32[N, K] each: the places of the first and of the last action of each turn; 0 where there is none."""
    L = batch.tokens.shape[1]
    own = turn_numbers(batch)[:, :, None] == jnp.arange(turn_count(batch))
    place = jnp.arange(L)[None, :, None]
    first, last = jnp.min(jnp.where(own, place, L), axis=1), jnp.max(jnp.where(own, place, 0), axis=1)
    return jnp.where(first < L, first, 0).astype(jnp.int32), last.astype(jnp.int32)


def following(values: Array, mask: Array) -> Array:
    """f32[N, K, H]: the values of the next turn of the row, 0 for the last; mask bool[N, K]: turns that are there.

    >>> following(jnp.array([[[1.0], [2.0], [3.0]]]), jnp.array([[True, False, True]]))[0, :, 0].tolist()
    [3.0, 3.0, 0.0]
    """

    def back(later: Array, now: tuple[Array, Array]) -> tuple[Array, Array]:
        own, there = now
        return jnp.where(there[:, None], own, later), later

    turns = (jnp.moveaxis(values, 1, 0), mask.T)
    return jnp.moveaxis(jax.lax.scan(back, jnp.zeros_like(values[:, 0]), turns, reverse=True)[1], 0, 1)


def targets_of_turns(
    rewards: Array, mask: Array, target_q: Array, target_v: Array, gamma: float | Array
) -> tuple[Array, Array]:
    """(y_Q, y_V), f32[N, K, 2] each: r + gamma Vbar(o'), without what follows for the last turn, and Qbar(o, a).

    rewards f32[N, K]; target_q, target_v f32[N, K, 2]: of the target critic, at each turn.
    """
    return rewards[..., None] + gamma * following(target_v, mask), target_q


@part
def advantages_of_replies(gamma: float = 0.95) -> Transform:
    """A = min(Q_1, Q_2) - min(V_1, V_2) on the tokens of each reply, and the critic's targets (2402.19446).

    Q_i learns r + gamma Vbar_i(o') from transitions, replayed ones too: all turns of scored rows. V_i learns
    Qbar_i(o, a), and the policy from A, where a is a draw of the policy: in the rows of the step, and in those of
    replies that were drawn anew at earlier states (info["resampled"]), which are no transitions. Tokens of replayed
    rows have advantage 0. Qbar and Vbar are of the target critic. r is the reward of the turn, with the score on the
    last one.

    Writes info["head_returns"] f32[N, L, 4], NaN where a head is not trained, and the controls "head_turns" f32[4], how
    many turns train each, and "turns", turns that train the policy per row of the batch.
    """
    check_number("gamma", gamma, least=0, most=1)

    def apply(batch: Trajectories) -> Trajectories:
        anew = (batch.info or {}).get("resampled")
        anew = jnp.zeros(batch.group.shape, bool) if anew is None else jnp.nan_to_num(anew) > 0
        mask = turn_mask(batch) & ~anew[:, None]
        own = (mask | (acted_turns(batch) & anew[:, None])) & ~replayed_rows(batch)[:, None]
        first, last = ends_of_turns(batch)

        def read(values: Array, place: Array) -> Array:
            return jnp.take_along_axis(values, place[:, :, None], axis=1)

        values, target = batch.need("values"), batch.need("target_values")
        Q, V = read(values[..., :2], last), read(values[..., 2:], first)
        rewards = rewards_of_turns(batch)
        y_q, y_v = targets_of_turns(rewards, mask, read(target[..., :2], last), read(target[..., 2:], first), gamma)
        A = jnp.where(own, jnp.min(Q, axis=-1) - jnp.min(V, axis=-1), 0.0)
        returns, acted = [], turn_numbers(batch) >= 0
        for place, where, y in ((last, mask, y_q), (first, own, y_v)):
            here = acted & (on_tokens(place.astype(jnp.float32), batch) == jnp.arange(batch.tokens.shape[1]))
            for head in range(2):
                told = on_tokens(jnp.where(where, y[..., head], jnp.nan), batch)
                returns.append(jnp.where(here, told, jnp.nan))
        count = jnp.sum(own).astype(jnp.float32)
        rows = jnp.maximum(jnp.sum(jnp.any(batch.action_mask, axis=1)), 1)
        counts = jnp.stack([jnp.sum(mask).astype(jnp.float32)] * 2 + [count] * 2)
        return (
            batch.replace(advantages=on_tokens(A, batch))
            .with_info(head_returns=jnp.stack(returns, axis=-1))
            .with_controls(head_turns=counts, turns=jnp.maximum(count, 1) / rows)
        )

    needs = {f"target_values:{HEADS}", "replayed", "resampled", "turn_rewards"}
    return stateless(apply, TURNS | needed_values(HEADS) | needs)


@part
def actor_after(updates: int) -> Transform:
    """Write the control "actor": 0 in the first so many updates, in which only the critic learns, and then 1."""
    check_number("updates", updates, least=0, whole=True)
    return counted(lambda t, batch: batch.with_controls(actor=jnp.where(t < updates, 0.0, 1.0)))
