"""How many samples to draw from what: allocation of a rollout budget. Plain functions for the loop that samples."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import expit, stdtrit

Floats = NDArray[np.float64]


def confidence_width(deviation: ArrayLike, count: ArrayLike, level: float = 0.05) -> Floats:
    """h(n) = t_{1 - level/2, n - 1} s / sqrt(n): half the confidence interval of a mean of n samples (n at least 2)."""
    n = np.asarray(count, np.float64)
    return stdtrit(n - 1, 1 - level / 2) * np.asarray(deviation, np.float64) / np.sqrt(n)


def exploration_priority(
    deviation: ArrayLike, count: ArrayLike, spent: float, coefficient: float = 0.1, level: float = 0.05
) -> Floats:
    """What one more rollout of each prompt is worth: h(n) - h(n + 1) + coefficient sqrt(log(1 + spent) / n).

    deviation (ddof 1) and count of each prompt's rewards so far, at least two; spent: rollouts so far, of all prompts
    (XRPO, 2510.06672).
    """
    n = np.asarray(count, np.float64)
    shrinks = confidence_width(deviation, n, level) - confidence_width(deviation, n + 1, level)
    return shrinks + coefficient * np.sqrt(np.log1p(spent) / n)


def allocate(
    deviation: ArrayLike, count: ArrayLike, spent: float, budget: int, coefficient: float = 0.1, level: float = 0.05
) -> NDArray[np.int64]:
    """Rollouts for each prompt in the next round: one each for the `budget` prompts of greatest priority.

    More than there are prompts go round again. Of equal priorities the earlier prompt comes first.
    """
    priority = exploration_priority(deviation, count, spent, coefficient, level)
    order = np.argsort(-priority, kind="stable")
    return np.bincount(order[np.arange(budget) % len(order)], minlength=len(order))


def whole_samples(budget: float, root_entropy: float, tool_entropy: float, beta: float = 0.5) -> float:
    """budget * sigmoid(beta (H_root - H_tool)), before rounding: how much of a budget goes to whole trajectories.

    The rest goes to branches at tool calls; H are mean entropies at the question and after tool results
    (AEPO, 2510.14545).
    """
    return float(budget * expit(beta * (root_entropy - tool_entropy)))


def branch_score(
    change: ArrayLike, consecutive: ArrayLike, alpha: float = 0.5, weight: float = 0.2, damping: float = 0.05
) -> Floats:
    """(alpha + weight dH) (1 - damping l): branch at a tool call where it is above a threshold (AEPO, 2510.14545).

    dH: entropy after the tool result less that at the start; l: high-entropy branch steps in a row just before.
    """
    return (alpha + weight * np.asarray(change, np.float64)) * (1 - damping * np.asarray(consecutive, np.float64))
