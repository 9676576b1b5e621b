"""Episodes of turns as batches, and the credit of their turns."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.trajectory import Trajectories

NEW = 2  # tokens of a turn, after which an observation comes


def episodes(
    states: list[list[int]], rewards: list[list[float]], score: Any = 0.0, group: list[int] | None = None,
    actions: list[list[int]] | None = None, room: int = 1,
) -> Trajectories:  # fmt: skip
    """Rows of turns of two tokens, each followed by one token of an observation."""
    rows, turns = len(states), max(room, *map(len, states))
    turn = np.full((rows, 1 + turns * (NEW + 1)), -1, np.int32)
    tokens = np.zeros(turn.shape, np.int32)
    keys, own = np.zeros((rows, turns), np.uint32), np.zeros((rows, turns), np.float32)
    for row, path in enumerate(states):
        keys[row, : len(path)], own[row, : len(path)] = path, rewards[row]
        for k in range(len(path)):
            place = 1 + k * (NEW + 1)
            turn[row, place : place + NEW] = k
            tokens[row, place : place + NEW] = (actions[row][k] if actions else 10 * row + k), k
    action = turn >= 0
    return Trajectories(
        tokens=jnp.asarray(tokens), token_mask=jnp.ones(turn.shape, bool), action_mask=jnp.asarray(action),
        behaviour_logp=jnp.where(action, -1.0 - jnp.arange(rows)[:, None], 0.0), policy_step=jnp.zeros(turn.shape, int),
        turn=jnp.asarray(turn), group=jnp.asarray(group or [0] * rows), prompt_id=jnp.asarray(group or [0] * rows),
        truncated=jnp.zeros(rows, bool), reward=jnp.broadcast_to(jnp.asarray(score, jnp.float32), (rows,)),
        turn_rewards=jnp.asarray(own), state_key=jnp.asarray(keys),
    )  # fmt: skip


def of_turns(batch: Trajectories, transform: Any) -> list[list[float]]:
    """The advantage of each turn, which all of its tokens have."""
    _, out = jax.jit(transform.apply)(transform.init(), batch)
    advantages, turn, found = np.asarray(out.advantages), np.asarray(batch.turn), list[list[float]]()
    for row in range(len(turn)):
        of_row = []
        for k in range(turn[row].max() + 1):
            values = advantages[row][turn[row] == k]
            assert np.ptp(values) == 0
            of_row.append(float(values[0]))
        found.append(of_row)
    assert not np.any(advantages[~np.asarray(batch.action_mask)])
    return found


def assert_close(found: list[list[float]], wanted: list[list[float]], tolerance: float = 2e-6) -> None:
    assert [len(row) for row in found] == [len(row) for row in wanted]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=tolerance)
