"""Tokens that the policy reads in other contexts than they were drawn in: answers after turns, actions after blanks."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.turns import turn_count, turn_numbers
from jaxrl_llm.core.needs.placeholders import no_answers
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.distributed.aot import compiled

BEFORE = -2  # ids of tokens that open an answer are BEFORE - id
Read = Callable[[Trajectories], jax.Array]  # log-probabilities [N, T] of the actions of other rows


def after_turns(batch: Trajectories, answers: jax.Array, turn: int | jax.Array) -> Trajectories:
    """Rows [N, L + A] of what comes before a turn and then the answer, whose own tokens are the actions.

    answers: f32[N, A], info["answer_tokens"]. Rows without that turn, or without an answer, have no actions.
    """
    ids, (N, L) = answers.astype(jnp.int32), batch.tokens.shape
    first = turn_numbers(batch) == turn
    start = jnp.argmax(first, axis=1)[:, None]
    place = jnp.broadcast_to(jnp.arange(L + ids.shape[1]), (N, L + ids.shape[1]))
    answer = jnp.take_along_axis(ids, jnp.clip(place - start, 0, ids.shape[1] - 1), axis=1)
    answer = jnp.where((place >= start) & (place < start + ids.shape[1]), answer, -1)
    before = place < start
    tokens = jnp.where(before, jnp.take_along_axis(batch.tokens, jnp.clip(place, 0, L - 1), axis=1), answer)
    tokens = jnp.where(~before & (answer <= BEFORE), BEFORE - answer, tokens)
    there = jnp.any(first, axis=1)[:, None] & jnp.any(ids >= 0, axis=1)[:, None]
    action = ~before & (answer >= 0) & there
    return _rows(batch, jnp.maximum(tokens, 0), before | (answer != -1), action)


def mean_of_answer(logp: jax.Array, mask: jax.Array) -> jax.Array:
    """f32[N]: the mean log-probability of an answer; NaN without one. logp, mask: [N, L + A], of `after_turns`."""
    count = jnp.sum(mask, axis=1)
    return jnp.where(count > 0, jnp.sum(jnp.where(mask, logp, 0.0), axis=1) / jnp.maximum(count, 1), jnp.nan)


def observation_of(batch: Trajectories) -> jax.Array:
    """int32[N, L]: the turn that follows, on each token between two turns; -1 elsewhere."""
    turn = jnp.where(batch.action_mask, turn_numbers(batch), 2**30)
    following = jax.lax.cummin(turn, axis=1, reverse=True)
    between = batch.token_mask & ~batch.action_mask & (following > 0) & (following < 2**30)
    return jnp.where(between, following, -1)


def with_blank(batch: Trajectories, blanked: jax.Array, turn: int | jax.Array) -> Trajectories:
    """The rows with other tokens in place of the observation before a turn, and only this turn's actions.

    blanked: f32[N, L], info["blanked"]. Rows in which nothing changes have no actions.
    """
    instead = (observation_of(batch) == turn) & (blanked >= 0)
    tokens = jnp.where(instead, jnp.nan_to_num(blanked).astype(jnp.int32), batch.tokens)
    action = batch.action_mask & (turn_numbers(batch) == turn) & jnp.any(instead, axis=1)[:, None]
    return _rows(batch, tokens, batch.token_mask, action, batch.support_floor)


def _rows(
    batch: Trajectories, tokens: jax.Array, known: jax.Array, action: jax.Array, floor: jax.Array | None = None
) -> Trajectories:
    zeros = jnp.zeros(tokens.shape)
    return Trajectories(
        tokens=tokens, token_mask=known, action_mask=action, behaviour_logp=zeros,
        policy_step=zeros.astype(jnp.int32), turn=jnp.where(action, 0, -1), group=batch.group,
        prompt_id=batch.prompt_id, truncated=batch.truncated, temperature=batch.temperature, support_floor=floor,
    )  # fmt: skip


def placed(logp: jax.Array, found: jax.Array, mask: jax.Array) -> jax.Array:
    """f32[N, L]: `found` where the mask is, else `logp`."""
    return jnp.where(mask, found, logp)


_after_turns, _mean_of_answer = compiled()(after_turns), compiled()(mean_of_answer)
_with_blank, _placed = compiled()(with_blank), compiled()(placed)


def answer_logp(batch: Trajectories, read: Read) -> jax.Array:
    """f32[N, K]: the mean log-probability of the reference answer before each turn; NaN without turn or answer."""
    ids, columns = (batch.info or {}).get("answer_tokens"), []
    ids = no_answers(batch, None) if ids is None else ids
    for turn in range(turn_count(batch)):
        rows = _after_turns(batch, ids, jnp.int32(turn))
        columns.append(_mean_of_answer(read(rows), rows.action_mask))
    return jnp.stack(columns, axis=1)


def blanked_logp(batch: Trajectories, logp: jax.Array, read: Read) -> jax.Array:
    """f32[N, L]: log-probabilities of each turn with the observation before it blanked; elsewhere `logp`."""
    ids, found = (batch.info or {}).get("blanked"), logp
    for turn in range(1, 1 if ids is None else turn_count(batch)):
        rows = _with_blank(batch, ids, jnp.int32(turn))
        found = _placed(found, read(rows), rows.action_mask)
    return found
