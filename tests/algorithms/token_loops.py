"""Reference loops in double precision for methods whose loss is PPO's clip on per-token advantages."""

from __future__ import annotations

from typing import Any

import numpy as np
from batches import finite_differences, gradient_of, loss_of, prepared

Floats = np.ndarray[Any, Any]


def doubles(x: Any) -> Floats:
    return np.asarray(x, np.float64)


def group_scores(reward: Any, group: Any, ddof: int = 1, epsilon: float = 1e-6) -> Floats:
    """(r - mean) / (std + epsilon) in each group, of the rows that have a reward."""
    reward, out = doubles(reward), np.zeros(len(reward))
    for g in set(np.asarray(group).tolist()):
        rows = [i for i in range(len(reward)) if group[i] == g and not np.isnan(reward[i])]
        values = [reward[i] for i in rows]
        if len(set(values)) > 1:
            mean = sum(values) / len(values)
            std = (sum((x - mean) ** 2 for x in values) / (len(values) - ddof)) ** 0.5
            for i in rows:
                out[i] = (reward[i] - mean) / (std + epsilon)
    return out


def clipped_loss(
    logp: Any,
    old: Any,
    A: Any,
    weights: Any,
    low: Any = 0.2,
    high: Any = 0.2,
    average: str = "token",
    dual: float | None = None,
) -> float:
    """Minus the average of min(rho A, clip(rho) A); low, high: numbers or [N, L]; weights are 0 off actions."""
    logp, old, A, weights = doubles(logp), doubles(old), doubles(A), doubles(weights)
    low, high = (np.broadcast_to(x, logp.shape) for x in (low, high))
    rows = []
    for i in range(len(logp)):
        total = 0.0
        for t in range(logp.shape[1]):
            if weights[i, t] == 0:
                continue
            rho = np.exp(logp[i, t] - old[i, t])
            clipped = min(max(rho, 1 - low[i, t]), 1 + high[i, t])
            value = min(rho * A[i, t], clipped * A[i, t])
            if dual is not None and A[i, t] < 0:
                value = max(value, dual * A[i, t])
            total += weights[i, t] * value
        rows.append((total, weights[i].sum()))
    if average == "token":
        return -sum(x for x, _ in rows) / max(sum(n for _, n in rows), 1e-9)
    means = [x / n for x, n in rows if n > 0]
    return -sum(means) / max(len(means), 1)


def agrees(
    algorithm: Any, batch: Any, logp: Any, A: Any, weights: Any = None, state: Any = None, **options: Any
) -> Any:
    """Check advantages, weights, loss and gradient of a method against the loop; the prepared batch."""
    ready = prepared(algorithm, batch, state)
    mask = np.asarray(batch.action_mask)
    weights = doubles(mask) if weights is None else weights * mask
    np.testing.assert_allclose(np.asarray(ready.loss_weights), weights, atol=1e-6)
    counts = weights != 0
    np.testing.assert_allclose(np.asarray(ready.advantages)[counts], doubles(A)[counts], rtol=2e-5, atol=1e-5)
    old = options.pop("old", batch.behaviour_logp)
    if state is None:

        def loop(logp: Any) -> float:
            return clipped_loss(logp, old, A, weights, **options)

        assert abs(loss_of(algorithm, batch, logp) - loop(logp)) < 1e-5
        np.testing.assert_allclose(gradient_of(algorithm, batch, logp), finite_differences(loop, logp), atol=2e-5)
    return ready
