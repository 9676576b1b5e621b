"""MPO: its three losses against a loop, the card's worked example, and the shift over steps."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from batches import batch_of, random_batch
from method_step import arrays, assert_matches_loop, learn

from jaxrl_llm.algorithms.preferences.mpo import Shift, mpo

BATCH, LOGP = random_batch(5, (2, 2, 2))
X = arrays(BATCH)
CHOSEN, REJECTED = np.flatnonzero(X.reward == 1), np.flatnonzero(X.reward == 0)


def softplus(x: np.ndarray) -> np.ndarray:
    return np.logaddexp(0, x)


def by_loop(logp: np.ndarray, beta: float, weights: tuple[float, float, float], shift: float) -> float:
    total = 0.0
    for w, l in zip(CHOSEN, REJECTED, strict=True):
        u_w, u_l = (beta * float(((logp - X.reference) * X.mask)[i].sum()) for i in (w, l))
        preference = softplus(np.asarray(u_l - u_w))
        quality = softplus(np.asarray(shift - u_w)) + softplus(np.asarray(u_l - shift))
        generation = -float((logp * X.mask)[w].sum()) / X.mask[w].sum()
        total += float(np.dot(weights, [float(preference), float(quality), generation]))
    return total / len(CHOSEN)


@pytest.mark.parametrize("shift", [0.0, 0.4])
def test_mpo_by_loop(shift: float) -> None:
    weights = (0.6, 0.9, 0.3)
    state = (Shift(jnp.float32(shift), jnp.float32(4)),)
    found = learn(mpo(*weights, beta=0.3), BATCH, LOGP, state=state[0])
    assert_matches_loop(found, lambda x: by_loop(x, 0.3, weights, shift), LOGP)


def test_worked_example() -> None:
    """log pi of -10 over 5 tokens and -12, of the reference -11 and -11.5."""
    logp = np.asarray([[-2.0] * 5, [-2.4] * 5])
    mask = np.ones((2, 5), bool)
    reference = np.asarray([[-2.2] * 5, [-2.3] * 5], np.float32)
    batch = batch_of(mask, np.asarray([1.0, 0.0]), logp, np.zeros(2, int), reference_logp=reference, old_logp=logp)
    found = learn(mpo(1, 1, 1), batch, logp)
    assert found.loss == pytest.approx(0.620957 + 1.312856 + 2.0, abs=2e-6)
    assert learn(mpo(1, 0, 0), batch, logp).loss == pytest.approx(0.620957, abs=2e-6)
    assert learn(mpo(0, 1, 0), batch, logp).metrics["quality"] == pytest.approx(1.312856, abs=2e-6)
    assert learn(mpo(), batch, logp).loss == pytest.approx(0.8 * 0.620957 + 0.2 * 1.312856 + 2.0, abs=2e-6)


def test_the_shift_is_the_mean_of_the_steps_before() -> None:
    method, seen = mpo(beta=0.2), list[float]()
    state: Any = method.transform.init()
    for seed, sizes in enumerate([(2, 2), (2, 2, 2), (2, 2)]):
        batch, _ = random_batch(seed, sizes)
        state, ready = method.transform.apply(state, batch)
        expected = np.mean(seen) if seen else 0.0
        assert float((ready.controls or {})["reward_shift"]) == pytest.approx(float(expected), abs=1e-6)
        x = arrays(batch)
        seen += (0.2 * ((x.old - x.reference) * x.mask).sum(1)).tolist()
