"""SRPO by sample routing against a loop in double precision, and in the limit without teachers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import finite_differences, outputs_of, random_batch
from method_step import arrays, assert_matches_loop, learn

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.guidance.srpo_sample_routing import srpo_sample_routing
from jaxrl_llm.core.reference import ReferenceRule

BATCH, LOGP = random_batch(9)
X = arrays(BATCH)
N, L = X.mask.shape
K = 4
RANDOM = np.random.default_rng(3)
P, Q = (np.log(RANDOM.dirichlet(np.ones(K + 1), (N, L)))[..., :K] for _ in range(2))
H = RANDOM.uniform(0, 2, (N, L))
TEACHER = np.where(np.arange(N)[:, None] % 3 == 0, -1.0, np.ones((N, 3)))
TAUGHT = BATCH.with_info(
    teacher_tokens=jnp.asarray(TEACHER), teacher_entropy=jnp.asarray(H, jnp.float32),
    teacher_logp=jnp.asarray(Q, jnp.float32),
)  # fmt: skip
Z = (X.reward <= 0.5) & (TEACHER[:, 0] >= 0)


def rest(logp: np.ndarray) -> np.ndarray:
    return np.append(logp, np.log(1 - np.exp(logp).sum()))


def loss(logp: np.ndarray, p: np.ndarray, share: float = 0.5, strength: float = 1.0) -> float:
    A = X.advantages("none")
    places = [(i, t) for i, t in X.tokens() if Z[i]]
    mean = np.mean([np.exp(-strength * H[place]) for place in places])
    total = 0.0
    for i, t in X.tokens():
        if not Z[i]:
            rho = np.exp(logp[i, t] - X.behaviour[i, t])
            total -= min(rho * A[i, 0], min(max(rho, 0.8), 1.28) * A[i, 0])
            continue
        a, b = rest(p[i, t]), rest(Q[i, t])
        m = np.log((1 - share) * np.exp(a) + share * np.exp(b))
        D = (1 - share) * (np.exp(a) * (a - m)).sum() + share * (np.exp(b) * (b - m)).sum()
        trust = min(np.exp(np.float32(LOGP[i, t]) - X.behaviour[i, t]), 2.0)  # not differentiated
        total += np.exp(-strength * H[i, t]) / mean * trust * D
    return total / X.mask.sum()


@pytest.mark.parametrize("options", [{}, {"share": 0.2, "strength": 0.5}])
def test_srpo_is_its_loop(options: dict[str, Any]) -> None:
    assert 0 < Z.sum() < (X.reward <= 0.5).sum()
    method = srpo_sample_routing(**options)
    found = learn(method, TAUGHT, LOGP, top_logp=P.astype(np.float32))
    assert_matches_loop(found, lambda logp: loss(logp, P, **options), LOGP)
    assert found.metrics["distil/share"] == pytest.approx(X.mask[Z].sum() / X.mask.sum(), rel=1e-6)

    def of_top(p: jax.Array) -> jax.Array:
        return method.objective(outputs_of(LOGP, top_logp=p), found.batch)[0]

    by_top = jax.grad(of_top)(jnp.asarray(P, jnp.float32))
    expected = finite_differences(lambda p: loss(LOGP, p, **options), P)
    np.testing.assert_allclose(by_top, expected, rtol=2e-3, atol=2e-6)
    assert not np.asarray(by_top)[~Z].any()


def test_without_teachers_it_is_grpo() -> None:
    none = TAUGHT.with_info(teacher_tokens=jnp.full((N, 1), -1.0))
    found = learn(srpo_sample_routing(), none, LOGP, top_logp=P.astype(np.float32))
    ordinary = learn(grpo(0.2, 0.28, kl_coefficient=0, scale="none", average="token"), BATCH, LOGP)
    np.testing.assert_allclose(found.gradient, ordinary.gradient, rtol=3e-7, atol=0)  # another program: last digits
    np.testing.assert_allclose(found.loss, ordinary.loss, rtol=1e-5)
    assert found.metrics["distil/loss"] == found.metrics["distil/share"] == 0


def test_the_teacher_is_a_moving_average() -> None:
    rule = srpo_sample_routing(decay=0.75).reference
    assert isinstance(rule, ReferenceRule)
    assert rule.update is not None
    assert float(rule.update({"w": jnp.float32(1)}, {"w": jnp.float32(3)}, jnp.int32(1))["w"]) == 1.5
