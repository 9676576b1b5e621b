"""SePPO: a loop, the anchor's sign, and the snapshots that it draws."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import random_batch
from method_step import arrays, assert_matches_loop, learn

from jaxrl_llm.algorithms.online_preferences.seppo import anchor_test, random_snapshot, seppo
from jaxrl_llm.core.reference import Snapshots, chosen_snapshot

BATCH, LOGP = random_batch(5, (2, 2, 2, 2))
X = arrays(BATCH)


def ratio_sums(logp: np.ndarray) -> np.ndarray:
    return ((logp - X.reference) * X.mask).sum(1)


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
def test_it_is_the_loop(loss: str) -> None:
    """Half of the prompts pass the anchor test; the sampled response of the others counts with the other sign."""
    before, beta, better = ratio_sums(X.old), 0.4, list[bool]()

    def own(z: float) -> float:
        return float(np.logaddexp(0, -z))

    def value(logp: np.ndarray) -> float:
        u, losses = ratio_sums(logp), []
        better.clear()
        for g in sorted(set(X.group)):
            rows = np.flatnonzero(X.group == g)
            w, l = rows[np.argmax(X.reward[rows])], rows[np.argmin(X.reward[rows])]
            sign = 1.0 if before[w] >= 0 else -1.0
            better.append(sign < 0)
            if loss == "sigmoid":
                losses.append(own(beta * (u[w] - sign * u[l])))
            else:
                n = X.mask.sum(1)
                losses.append((u[w] / n[w] - sign * u[l] / n[l] - 1 / (2 * beta)) ** 2)
        return float(np.mean(losses))

    found = learn(seppo(beta, loss=loss), BATCH, LOGP)
    assert_matches_loop(found, value, LOGP, tolerance=1e-5)
    assert 0 < np.mean(better) < 1
    assert found.metrics["sampled/better"] == pytest.approx(np.mean(better))


def test_where_the_policy_is_its_reference_the_sampled_response_is_the_worse_one() -> None:
    same = BATCH.replace(reference_logp=BATCH.old_logp)
    _, ready = anchor_test().apply(anchor_test().init(), same)
    np.testing.assert_array_equal(ready.need("sign"), 1)
    assert not np.any(ready.need("better"))


def test_the_reference_is_drawn_among_the_snapshots_that_are_taken() -> None:
    """Weights are the number of updates after which they were; three places, of which the first stays."""
    rule = random_snapshot(3, every=2)
    assert rule.update is not None
    reference: Any = rule.init(jnp.float32(0), ())
    update, drawn = jax.jit(rule.update), list[tuple[float, float, list[float]]]()
    for n in range(1, 401):
        reference = update(reference, jnp.float32(n), jnp.int32(n))
        assert isinstance(reference, Snapshots)
        drawn.append((n, float(chosen_snapshot(reference)), [float(x) for x in reference.policies]))
    kept = {n: {0.0, *[float(k) for k in (n // 2 * 2, n // 2 * 2 - 2) if k > 0]} for n, _, _ in drawn}
    assert all(set(policies) == kept[n] for n, _, policies in drawn), "the newest two, and the first"
    assert all(now in kept[n] for n, now, _ in drawn)
    ages = np.array([(0 if now == 0 else 2 if now == n // 2 * 2 else 1) for n, now, _ in drawn[4:]])
    np.testing.assert_allclose(np.bincount(ages) / len(ages), 1 / 3, atol=0.08)
