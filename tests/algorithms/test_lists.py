"""Losses of lists of responses against loops in double precision, and the worked example of LiPO's card."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import random_batch
from method_step import arrays, assert_matches_loop, learn

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.preferences.lipo import LIST_LOSSES, Lists
from jaxrl_llm.utils.errors import InputError

GROUPS = (4, 3, 2, 5)
BATCH, LOGP = random_batch(7, GROUPS)
LABELS = np.array([0.9, 0.2, 0.2, 0.5, 1.0, 0.0, np.nan, 0.4, 0.4, 0.1, 0.8, 0.3, 0.3, 0.6], np.float32)
BATCH = BATCH.replace(reward=jnp.asarray(LABELS))
X = arrays(BATCH)
BETA = 0.3
PairTerm = Callable[[float, float, float], float]


def lists(scores: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """(labels, scores) of the scored rows of each list."""
    found = [np.flatnonzero((X.group == g) & ~np.isnan(LABELS)) for g in range(len(GROUPS))]
    return [(LABELS[rows].astype(float), scores[rows]) for rows in found]


def by_loop(name: str, psi: np.ndarray, s: np.ndarray) -> float:
    total, K = 0.0, len(s)
    if len(set(psi)) == 1:
        return 0.0
    rank = [1 + sum(other > one for other in s) for one in s]
    order = sorted(range(K), key=lambda k: -psi[k])
    for i in range(K):
        for j in range(K):
            if psi[i] > psi[j]:
                gap = s[i] - s[j]
                weight = abs(2 ** psi[i] - 2 ** psi[j]) * abs(1 / np.log(1 + rank[i]) - 1 / np.log(1 + rank[j]))
                terms = {"lambda": weight * np.log1p(np.exp(-gap)), "logistic": np.log1p(np.exp(-gap))}
                total += (terms | {"hinge": max(0.0, 1 - gap)}).get(name, 0.0)
    for place, k in enumerate(order):
        p = 1 / (1 + np.exp(-s[k]))
        total += {
            "list_mle": np.log(sum(np.exp(s[l]) for l in order[place:])) - s[k],
            "softmax": psi[k] / psi.sum() * (np.log(np.exp(s).sum()) - s[k]),
            "squares": (psi[k] - s[k]) ** 2,
            "sigmoid": -psi[k] * np.log(p) - (1 - psi[k]) * np.log(1 - p),
        }.get(name, 0.0)
    return float(total)


@pytest.mark.parametrize("name", LIST_LOSSES)
def test_lipo_by_loop(name: str) -> None:
    def loss(logp: np.ndarray) -> float:
        scores = BETA * ((logp - X.reference) * X.mask).sum(1)
        return float(np.mean([by_loop(name, *one) for one in lists(scores)]))

    assert_matches_loop(learn(algorithms.get("lipo", loss=name, beta=BETA), BATCH, LOGP), loss, LOGP)


def test_the_worked_example() -> None:
    psi, s = jnp.array([1.0, 0.5, 0.0]), jnp.array([0.2, 0.5, -0.1])
    example = Lists(psi, s, jnp.ones((3, 3), bool), psi[:, None] > psi)
    expected = {"lambda": 0.501909, "logistic": 1.846198, "list_mle": 1.565878, "softmax": 1.028390, "hinge": 2.4}
    for name, value in expected.items():
        assert float(LIST_LOSSES[name](example).sum()) == pytest.approx(value, abs=1e-5)


def test_equal_scores_are_ranked_so_that_the_first_step_has_a_gradient() -> None:
    psi, s = jnp.array([0.0, 1.0, 0.5]), jnp.zeros(3)
    mates, above = jnp.ones((3, 3), bool), psi[:, None] > psi
    slope = jax.grad(lambda s: LIST_LOSSES["lambda"](Lists(psi, s, mates, above)).sum())(s)
    d = [1 / np.log(2), 1 / np.log(3), 1 / np.log(4)]
    pairs = {(1, 0): 1 * (d[0] - d[1]), (2, 0): (2**0.5 - 1) * (d[0] - d[2]), (1, 2): (2 - 2**0.5) * (d[1] - d[2])}
    loop = np.zeros(3)
    for (i, j), weight in pairs.items():
        loop[[i, j]] += np.array([-0.5, 0.5]) * weight
    np.testing.assert_allclose(slope, loop, rtol=1e-5)


def test_a_list_of_two_is_a_pair() -> None:
    batch, logp = random_batch(3, (2, 2))
    one, other = (
        learn(algorithms.get(name, **how), batch, logp)
        for name, how in (("lipo", {"loss": "logistic", "beta": 0.1}), ("dpo", {"beta": 0.1}))
    )
    assert float(one.loss) == pytest.approx(float(other.loss), rel=1e-6)
    np.testing.assert_allclose(one.gradient, other.gradient, atol=1e-7)


def test_an_unknown_loss_is_refused() -> None:
    with pytest.raises(InputError, match="loss of lists 'lambada'"):
        algorithms.get("lipo", loss="lambada")
