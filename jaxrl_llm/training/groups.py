"""Scored batches taken apart into groups, put together from groups, and filled up with empty ones."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.training.rollout import Scored
from jaxrl_llm.trajectory import Trajectories, map_rows

PADDING = {"turn": -1, "support_floor": -np.inf}  # of [N, L] fields; 0 of the others


def group_of(scored: Scored, number: int, size: int) -> Scored:
    """The rows of one group. Failures are not known by row: the first group has them all."""
    place = slice(number * size, (number + 1) * size)
    failures = {name: 0 if number else count for name, count in scored.failures.items()}
    return Scored(jax.tree.map(lambda x: np.asarray(x)[place], scored.batch), scored.texts[place], failures)


def join(groups: list[Scored]) -> Scored:
    """One batch of groups of possibly different widths, numbered in their order."""
    width = max(group.batch.tokens.shape[1] for group in groups)

    def widened(batch: Trajectories, number: int) -> Trajectories:
        wide = {
            name: np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=PADDING.get(name, 0))
            for name, x in vars(batch).items()
            if isinstance(x, np.ndarray) and x.ndim == 2
        }
        return batch.replace(**wide, group=np.full(batch.group.shape, number, np.int32))

    batches = [widened(group.batch, number) for number, group in enumerate(groups)]
    return Scored(
        jax.tree.map(lambda *x: jnp.asarray(np.concatenate(x)), *batches),
        [text for group in groups for text in group.texts],
        {name: sum(group.failures[name] for group in groups) for name in groups[0].failures},
    )


def fill_up(batch: Trajectories, rows: int, group_size: int) -> Trajectories:
    """The batch with groups without any action, up to `rows` rows, so that all steps share a compiled update.

    They are copies of the first group's prompt, count in no mean, and leave loss and gradient as they are. Only where
    there are more minibatches than groups with actions can a gradient step see nothing but such.
    """
    have = batch.tokens.shape[0]
    if have == rows:
        return batch
    index = np.concatenate([np.arange(have), np.arange(rows - have) % group_size])
    empty = np.arange(rows) >= have
    numbers = np.asarray(batch.group).max() + 1 + (np.arange(rows) - have) // group_size
    batch = map_rows(lambda x: jnp.asarray(np.asarray(x)[index]), batch)
    before = np.cumsum(np.asarray(batch.action_mask), axis=1) == 0
    return batch.replace(
        token_mask=batch.token_mask & jnp.asarray(before | ~empty[:, None]),
        action_mask=batch.action_mask & jnp.asarray(~empty[:, None]),
        turn=jnp.where(empty[:, None], -1, batch.turn),
        group=jnp.asarray(np.where(empty, numbers, np.asarray(batch.group)).astype(np.int32)),
    )
