"""Batches filled up with empty groups, so that all steps have one size."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.trajectory import Trajectories, map_rows


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
    batch = map_rows(lambda x: np.asarray(x)[index], batch)
    before = np.cumsum(np.asarray(batch.action_mask), axis=1) == 0
    return batch.replace(
        token_mask=batch.token_mask & (before | ~empty[:, None]),
        action_mask=batch.action_mask & ~empty[:, None],
        turn=np.where(empty[:, None], -1, batch.turn).astype(np.int32),
        group=np.where(empty, numbers, np.asarray(batch.group)).astype(np.int32),
    )
