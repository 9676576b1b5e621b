"""The same actions after another prompt, which a teacher reads: rows of a batch, and back."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Trajectories


def under_teacher(batch: Trajectories, tokens: jax.Array, top: jax.Array) -> Trajectories:
    """The batch whose rows are `tokens` f32[N, T]: another prompt, then the row's tokens from its first action on.

    T positions; -1 after the tokens, and everywhere in rows without another prompt, which have no actions. top:
    f32[N, L, K], info["top_tokens"] at the actions, which moves with them. Nothing else of info is kept, and no support
    of top-k or top-p, which is not known under this prompt.
    """
    ids = tokens.astype(jnp.int32)
    known = ids >= 0
    columns, inside = _columns(batch, known)

    def moved(x: jax.Array, otherwise: Any) -> jax.Array:
        found = jnp.take_along_axis(x, columns.reshape(*columns.shape, *[1] * (x.ndim - 2)), axis=1)
        return jnp.where(inside.reshape(*inside.shape, *[1] * (x.ndim - 2)), found, otherwise)

    zeros = jnp.zeros(ids.shape)
    return Trajectories(
        tokens=jnp.maximum(ids, 0), token_mask=known, action_mask=moved(batch.action_mask, False),
        behaviour_logp=zeros, policy_step=zeros.astype(jnp.int32), turn=moved(batch.turn, -1), group=batch.group,
        prompt_id=batch.prompt_id, truncated=batch.truncated, temperature=batch.temperature,
        info={"top_tokens": moved(top, 0.0)},
    )  # fmt: skip


def from_teacher(batch: Trajectories, tokens: jax.Array, found: Any) -> Any:
    """Arrays [N, T, ...] of the actions in `under_teacher` at their places in the batch, [N, L, ...]; 0 elsewhere."""
    known = tokens >= 0
    L, T = batch.tokens.shape[1], tokens.shape[1]
    shift = _first(batch) - _prompts(batch, known)
    columns = jnp.arange(L) - shift[:, None]
    inside = batch.action_mask & (columns >= 0) & (columns < T) & jnp.any(known, axis=1)[:, None]
    columns = jnp.clip(columns, 0, T - 1)

    def back(x: jax.Array) -> jax.Array:
        more = [1] * (x.ndim - 2)
        moved = jnp.take_along_axis(x, columns.reshape(*columns.shape, *more), axis=1)
        return jnp.where(inside.reshape(*inside.shape, *more), moved, 0.0)

    return jax.tree.map(back, found)


def _first(batch: Trajectories) -> jax.Array:
    """int32[N]: the first action of each row; 0 without actions."""
    return jnp.argmax(batch.action_mask, axis=1)


def _prompts(batch: Trajectories, known: jax.Array) -> jax.Array:
    """int32[N]: tokens of the other prompts: those that are not the row's own from its first action on."""
    own = jnp.sum(batch.token_mask, axis=1) - _first(batch)
    return jnp.sum(known, axis=1) - own


def _columns(batch: Trajectories, known: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Of each place under the teacher, int32[N, T] its column in the batch, and bool[N, T] whether it has one."""
    place = jnp.arange(known.shape[1])
    prompt = _prompts(batch, known)[:, None]
    inside = known & (place >= jnp.maximum(prompt, 1))
    return jnp.clip(place - prompt + _first(batch)[:, None], 0, batch.tokens.shape[1] - 1), inside
