"""How much of a prepared batch there is to learn from."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxrl_llm.core.trajectory import Trajectories


def signal(batch: Trajectories) -> float:
    """The share of rows with a learning signal, 0 to 1, in a batch that a method's transform has prepared.

    A row has one where an advantage that counts in the loss is not 0; what regularises (a KL penalty, an entropy bonus)
    is none. Methods without advantages compare rewards in their objective: with those of the other samples of a
    prompt, or, where every prompt has one sample, with those of the batch. Rows without actions, or that are only
    measured, are left out; 0 where all are. Reads the batch on the host, and compiles nothing.
    """
    action = np.asarray(batch.action_mask)
    rows: Any = action.any(axis=1)
    marks = (batch.info or {}).get("measured")
    if marks is not None:
        rows &= ~(np.asarray(marks) > 0)
    if not rows.any():
        return 0.0
    if batch.advantages is None:
        return float(_compared(batch)[rows].mean())
    counts = np.asarray(batch.loss_weights) != 0
    return float((counts & (np.asarray(batch.advantages) != 0)).any(axis=1)[rows].mean())


def _compared(batch: Trajectories) -> np.ndarray:
    """bool[N]: rows of groups whose scored rows differ in their reward; of the whole batch, with groups of one."""
    if batch.reward is None:
        return np.ones(batch.tokens.shape[0], bool)
    reward, group = np.asarray(batch.reward, np.float64), np.asarray(batch.group)
    scored = ~np.isnan(reward) & np.asarray(batch.action_mask).any(axis=1)
    if np.unique(group[scored], return_counts=True)[1].max(initial=1) == 1:
        group = np.zeros_like(group)
    out = np.zeros(len(reward), bool)
    for name in np.unique(group):
        of = reward[(group == name) & scored]
        out |= (group == name) & (of.size > 1 and np.ptp(of) > 1e-6 * max(1.0, float(np.abs(of).max())))
    return out
