"""Policy losses as loops over numpy arrays in double precision, for the tests of methods."""

from __future__ import annotations

from typing import Any

import numpy as np


def averaged(gain: np.ndarray, mask: np.ndarray, average: str) -> float:
    """-gain[N, L] averaged over the tokens of the mask; rows without a token do not count."""
    rows, total, tokens = 0, 0.0, 0
    for n in range(len(mask)):
        of_row = [gain[n, t] for t in range(mask.shape[1]) if mask[n, t]]
        if of_row:
            rows += 1
            tokens += len(of_row)
            total += sum(of_row) / (len(of_row) if average == "sequence" else 1)
    return -total / (tokens if average == "token" else rows)


def score_loss(A: Any, logp: np.ndarray, mask: np.ndarray, average: str = "sum") -> float:
    return averaged(np.asarray(A) * logp, mask, average)


def clipped_loss(
    A: Any, logp: np.ndarray, old: np.ndarray, mask: np.ndarray, low: float, high: float, average: str
) -> float:
    gain = np.zeros(mask.shape)
    for n, t in zip(*np.nonzero(mask), strict=True):
        rho = np.exp(logp[n, t] - old[n, t])
        gain[n, t] = min(rho * A[n][t], min(max(rho, 1 - low), 1 + high) * A[n][t])
    return averaged(gain, mask, average)


def on_tokens(A: Any, mask: np.ndarray) -> np.ndarray:
    """Row advantages [N] on every token of the mask."""
    return np.asarray(A, float)[:, None] * mask
