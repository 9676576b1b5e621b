"""Reference losses that weight or clip ratios: loops in double precision over rows and tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from batches import finite_differences, gradient_of, loss_of, random_batch

from jaxrl_llm.core.algorithm import Algorithm

Rows = list[list[float]]  # values of the actions of each row


@dataclass
class Case:
    """A ragged batch with an unscored row, as lists of the actions of each scored row: the other one weighs nothing."""

    batch: Any
    logp: np.ndarray

    @property
    def scored(self) -> np.ndarray:
        return np.flatnonzero(~np.isnan(np.asarray(self.batch.reward)))

    @property
    def reward(self) -> np.ndarray:
        return np.asarray(self.batch.reward, np.float64)[self.scored]

    @property
    def group(self) -> np.ndarray:
        return np.asarray(self.batch.group)[self.scored]

    @property
    def mask(self) -> np.ndarray:
        """bool[N, L]: the actions of scored rows."""
        return np.asarray(self.batch.action_mask) & ~np.isnan(np.asarray(self.batch.reward))[:, None]

    def of_every_row(self, values: Any) -> np.ndarray:
        """Values of the scored rows, f[N] with 0 for the other."""
        out = np.zeros(len(self.batch.reward))
        out[self.scored] = values
        return out

    def rows(self, x: Any) -> Rows:
        """The entries f[N, L] of the actions of each scored row, in double precision."""
        mask = np.asarray(self.batch.action_mask)
        return [[float(v) for v, m in zip(x[n], mask[n], strict=True) if m] for n in self.scored]

    @property
    def behaviour(self) -> Rows:
        return self.rows(np.asarray(self.batch.behaviour_logp, np.float64))

    @property
    def old(self) -> Rows:
        return self.rows(np.asarray(self.batch.old_logp, np.float64))

    @property
    def reference(self) -> Rows:
        return self.rows(np.asarray(self.batch.reference_logp, np.float64))

    @property
    def advantage(self) -> list[float]:
        return advantage(self.reward, self.group)

    @property
    def centred(self) -> list[float]:
        return advantage(self.reward, self.group, std=False)


def case(seed: int = 0, **fields: Any) -> Case:
    batch, logp = random_batch(seed, **fields)
    return Case(batch.replace(reward=batch.reward.at[5].set(np.nan)), logp)


def advantage(reward: Any, group: Any, std: bool = True) -> list[float]:
    """(r - mean) / (std + 1e-6) of the scored rows of the group, or r - mean; 0 where not scored or all are equal."""
    reward, group = np.asarray(reward, np.float64), np.asarray(group)
    out = []
    for r, g in zip(reward, group, strict=True):
        others = [x for x, h in zip(reward, group, strict=True) if h == g and not np.isnan(x)]
        if np.isnan(r) or len(others) < 2:
            out.append(0.0)
            continue
        centre = r - np.mean(others)
        out.append(centre / (np.std(others, ddof=1) + 1e-6) if std and np.std(others) > 0 else centre)
    return out


def clipped(ratio: float, A: float, low: float, high: float) -> float:
    return min(ratio * A, min(max(ratio, 1 - low), 1 + high) * A)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def token_mean(rows: Rows) -> float:
    return mean([v for row in rows for v in row])


def sequence_mean(rows: Rows) -> float:
    return mean([mean(row) for row in rows])


def per_token(rows: int, lengths: list[int], value: Callable[[int, int], float]) -> Rows:
    """value(row, token) for each action."""
    return [[value(i, t) for t in range(lengths[i])] for i in range(rows)]


def assert_is_the_loop(algorithm: Algorithm, case: Case, loop: Callable[[Rows, Rows], float], **more: Any) -> None:
    """Loss and gradient are those of loop(logp, held): `held` is logp under stop-gradient."""
    logp = np.asarray(case.logp, np.float32).astype(np.float64)
    held = case.rows(logp)
    expected = loop(held, held)
    found = loss_of(algorithm, case.batch, logp, **more)
    np.testing.assert_allclose(found, expected, rtol=2e-5, atol=2e-6)
    slope = finite_differences(lambda x: loop(case.rows(x), held), logp)
    np.testing.assert_allclose(gradient_of(algorithm, case.batch, logp, **more), slope, rtol=2e-4, atol=2e-6)
    assert np.abs(slope).max() > 0
