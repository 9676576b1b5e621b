"""Batches filled up to one size, so that few programs are compiled."""

import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.trajectory import Trajectories, map_rows


def fill_up(batch: Trajectories, rows: int, group_size: int, measured: int = 0) -> Trajectories:
    """The batch with groups without any action, up to `rows` rows, so that all steps share a compiled update.

    They are copies of the first rows' prompts, count in no mean, and leave loss and gradient as they are. Only where
    there are more minibatches than groups with actions can a gradient step see nothing but such. measured: how many of
    them, at the end, count as rows that no update takes, in a batch with info["measured"].
    """
    have = batch.tokens.shape[0]
    if have == rows:
        return batch
    index = np.concatenate([np.arange(have), np.arange(rows - have) % min(group_size, have)])
    empty = np.arange(rows) >= have
    numbers = np.asarray(batch.group).max() + 1 + (np.arange(rows) - have) // group_size
    batch = map_rows(lambda x: np.asarray(x)[index], batch)
    if measured:
        marks = np.where(empty, 0, np.asarray(batch.need("measured"))).astype(np.float32)
        marks[rows - measured :] = 1
        batch = batch.with_info(measured=jnp.asarray(marks))
    before = np.cumsum(np.asarray(batch.action_mask), axis=1) == 0
    return batch.replace(
        token_mask=batch.token_mask & (before | ~empty[:, None]),
        action_mask=batch.action_mask & ~empty[:, None],
        turn=np.where(empty[:, None], -1, batch.turn).astype(np.int32),
        group=np.where(empty, numbers, np.asarray(batch.group)).astype(np.int32),
    )


def at_full_size(batch: Trajectories, usual: int, group_size: int) -> Trajectories:
    """The batch filled up to a multiple of its usual number of rows, so that few sizes are compiled.

    Programs may return more rows than the usual. Rows that are only measured (info["measured"]) have a multiple of
    their own, at least one, because there are none in the first step.
    """
    marks, rows = (batch.info or {}).get("measured"), batch.tokens.shape[0]
    measured = 0 if marks is None else int(np.sum(np.asarray(marks) > 0))
    trained = -(-(rows - measured) // usual) * usual
    full = 0 if marks is None else max(-(-measured // usual), 1) * usual
    return fill_up(batch, trained + full, group_size, full - measured)
