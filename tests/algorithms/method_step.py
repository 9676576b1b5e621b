"""Helpers of the tests of methods: one compiled step of a method, and a batch as numpy arrays in double precision."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from batches import finite_differences, outputs_of

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.trajectory import Trajectories


class Learned(NamedTuple):
    loss: float
    gradient: np.ndarray  # by logp, f32[N, L]
    by_entropy: np.ndarray
    batch: Trajectories  # prepared and refreshed
    metrics: dict[str, float]
    state: Any


def learn(
    algorithm: Algorithm, batch: Trajectories, logp: Any, entropy: Any = None, state: Any = None, **extras: Any
) -> Learned:
    """Transform, refresh, loss and gradient, compiled as one."""

    @jax.jit
    def step(state: Any, batch: Trajectories, outputs: Any) -> Any:
        state, batch = algorithm.transform.apply(state, batch)
        (loss, metrics), by = jax.value_and_grad(algorithm.objective, has_aux=True)(outputs, batch)
        return loss, by.logp, by.entropy, algorithm.objective.refreshed(outputs, batch), metrics, state

    state = algorithm.transform.init() if state is None else state
    loss, gradient, by_entropy, ready, metrics, state = step(state, batch, outputs_of(logp, entropy, **extras))
    numbers = {name: float(value) for name, value in metrics.items()}
    return Learned(float(loss), np.asarray(gradient), np.asarray(by_entropy), ready, numbers, state)


class Arrays(NamedTuple):
    mask: np.ndarray
    reward: np.ndarray
    group: np.ndarray
    behaviour: np.ndarray
    old: np.ndarray
    reference: np.ndarray
    entropy: np.ndarray

    def advantages(self, scale: str = "std", ddof: int = 1, epsilon: float = 1e-6) -> np.ndarray:
        """f64[N, 1], group by group."""
        out = np.zeros((len(self.reward), 1))
        for g in set(self.group):
            mine = self.group == g
            r = self.reward[mine]
            out[mine, 0] = (r - r.mean()) / (r.std(ddof=ddof) + epsilon if scale == "std" else 1.0)
        return out

    def tokens(self) -> list[tuple[int, int]]:
        return [(int(i), int(t)) for i, t in np.argwhere(self.mask)]


def arrays(batch: Trajectories) -> Arrays:
    names = ("reward", "group", "behaviour_logp", "old_logp", "reference_logp", "entropy")
    return Arrays(
        np.asarray(batch.action_mask), *(np.asarray(getattr(batch, n), None if n == "group" else float) for n in names)
    )


def assert_matches_loop(found: Learned, loss: Any, logp: np.ndarray, tolerance: float = 2e-6) -> None:
    """Value and gradient are those of the loop `loss(logp f64[N, L]) -> float`."""
    logp = np.asarray(np.asarray(logp, np.float32), np.float64)
    np.testing.assert_allclose(found.loss, loss(logp), rtol=2e-5, atol=tolerance)
    np.testing.assert_allclose(found.gradient, finite_differences(loss, logp), rtol=1e-3, atol=tolerance)


def one_row(tokens: int, **fields: Any) -> Any:
    """Fields f[tokens] as a batch of one row, with advantages given."""
    from batches import batch_of

    rows = {name: np.asarray(value, float)[None] for name, value in fields.items()}
    return batch_of(np.ones((1, tokens), bool), np.zeros(1), **rows).replace(
        advantages=jnp.asarray(rows["advantages"], jnp.float32)
    )
