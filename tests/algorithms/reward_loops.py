"""Loops in double precision that the tests of the reward methods share: group statistics and the clipped loss."""

from __future__ import annotations

from typing import Any

import numpy as np
from batches import batch_of, finite_differences, gradient_of, loss_of, prepared

from jaxrl_llm.core.algorithm import Algorithm

ROWS, WIDTH, WIDE = 11, 6, 4094  # of random_batch, and of long rows: batches of one shape share compiled programs


def rows_of(reward: Any, lengths: Any = 2, behaviour: Any = -1.0, group: Any = 0, **fields: Any) -> Any:
    """A batch of rows with these lengths; rows of a group of their own, without actions, fill it up to ROWS."""
    n, width = len(reward), WIDTH if np.max(lengths) <= WIDTH else WIDE

    def fill(x: Any, value: Any = 0) -> np.ndarray:
        x = np.asarray(x)
        return np.concatenate([x, np.full((ROWS - n, *x.shape[1:]), value, x.dtype)])

    lengths = fill(np.broadcast_to(lengths, n))
    mask = np.arange(width) < lengths[:, None]
    logp = np.zeros((ROWS, width))
    given = np.broadcast_to(np.asarray(behaviour, np.float64), (n, np.shape(behaviour)[1] if np.ndim(behaviour) else 1))
    logp[:n, : given.shape[1] if given.shape[1] > 1 else width] = given
    for kind in ("rewards", "info"):
        if kind in fields:
            fields[kind] = {name: fill(x) for name, x in fields[kind].items()}
    group = fill(np.broadcast_to(group, n), 9)
    return batch_of(mask, fill(np.asarray(reward, np.float64), 1.0), np.where(mask, logp, 0.0), group, **fields)


def group_scores(reward: Any, group: Any, ddof: int = 1, epsilon: float = 1e-6, scale: bool = True) -> np.ndarray:
    """(r - mean) / (std + epsilon) of the scored rows of each group; 0 for NaN, groups of one and equal rewards."""
    out = np.zeros(len(reward))
    for g in set(np.asarray(group).tolist()):
        rows = [i for i in range(len(reward)) if group[i] == g and not np.isnan(reward[i])]
        values = [float(reward[i]) for i in rows]
        if len(rows) < 2 or max(values) - min(values) < 1e-7:
            continue
        mean = sum(values) / len(values)
        std = (sum((v - mean) ** 2 for v in values) / (len(values) - ddof)) ** 0.5
        for i, v in zip(rows, values, strict=True):
            out[i] = (v - mean) / (std + epsilon if scale else 1.0)
    return out


def clipped_loss(
    logp: np.ndarray,
    batch: Any,
    A: np.ndarray,
    low: float = 0.2,
    high: float = 0.2,
    dual: float | None = None,
    kl: float = 0.0,
    average: str = "tokens",
    weights: Any = None,
    guided: Any = None,
    length: float = 1.0,
) -> float:
    """The clipped loss of advantages A [N, L] or [N], with p/(p + 0.1) on guided rows and `kl` times k3.

    average: "tokens", "sequences" (mean of row means) or "constant" (mean of row sums / length).
    """
    mask, behaviour = np.asarray(batch.action_mask), np.asarray(batch.behaviour_logp, np.float64)
    N, L = mask.shape
    A = np.broadcast_to(A if A.ndim == 2 else A[:, None], (N, L))
    total, tokens, rows = 0.0, 0, 0
    for i in range(N):
        if weights is not None and weights[i] == 0:
            rows += average == "constant" and mask[i].any()
            continue
        row, count = 0.0, 0
        for t in range(L):
            if not mask[i, t]:
                continue
            ratio, a = np.exp(logp[i, t] - behaviour[i, t]), float(A[i, t])
            if guided is not None and guided[i]:
                p = np.exp(logp[i, t])
                value = -a * p / (p + 0.1)
            else:
                value = -min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a)
                value = min(value, -dual * a) if dual is not None and a < 0 else value
            if kl:
                difference = logp[i, t] - float(batch.reference_logp[i, t])
                value += kl * (np.exp(-difference) - 1 + difference)
            row, count = row + value, count + 1
        tokens, rows = tokens + count, rows + (count > 0)
        total += row / max(count, 1) if average == "sequences" else row
    return total / {"tokens": tokens, "sequences": rows, "constant": rows * length}[average]


def assert_like_loop(algorithm: Algorithm, batch: Any, logp: Any, A: np.ndarray, **options: Any) -> None:
    """Advantages, loss and gradient of a method are those of the loop."""
    found = np.asarray(prepared(algorithm, batch).advantages)
    mask = np.asarray(batch.action_mask)
    np.testing.assert_allclose(found, (A if A.ndim == 2 else A[:, None]) * mask, rtol=2e-5, atol=3e-6)

    def loss(x: np.ndarray) -> float:
        return clipped_loss(x, batch, A, **options)

    logp = np.asarray(logp, np.float64)
    np.testing.assert_allclose(loss_of(algorithm, batch, logp), loss(logp), rtol=2e-5, atol=2e-6)
    expected = finite_differences(loss, logp)
    np.testing.assert_allclose(
        gradient_of(algorithm, batch, logp), expected, rtol=1e-3, atol=2e-5 * np.abs(expected).max()
    )


def assert_on_policy(algorithm: Algorithm, batch: Any) -> None:
    """At the policy that sampled, without a penalty, the gradient is -A / tokens (a token mean)."""
    ready = prepared(algorithm, batch)
    weights = np.asarray(ready.loss_weights)
    expected = -np.asarray(ready.advantages) * weights / max(weights.sum(), 1)
    np.testing.assert_allclose(gradient_of(algorithm, batch, batch.behaviour_logp), expected, atol=1e-6)
