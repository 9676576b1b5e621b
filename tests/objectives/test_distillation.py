"""Divergences of distributions, confidence weights and the choice of rows, by hand and in double precision."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parent.parent / "algorithms"))

from batches import batch_of, finite_differences

from jaxrl_llm.algorithms.guidance.srpo_sample_routing import (
    confidence_weights,
    route_failures,
    self_distillation,
)
from jaxrl_llm.objectives.distillation.divergences import generalised_jsd, with_rest
from jaxrl_llm.utils.errors import InputError

P = np.log(np.random.default_rng(0).dirichlet(np.ones(4), (3, 2)))
Q = np.log(np.random.default_rng(1).dirichlet(np.ones(4), (3, 2)))


def divergence(p: np.ndarray, q: np.ndarray, a: float) -> np.ndarray:
    def kl(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return (np.exp(x) * (x - y)).sum(-1)

    if a in (0, 1):
        return kl(p, q) if a else kl(q, p)
    m = np.log((1 - a) * np.exp(p) + a * np.exp(q))
    return (1 - a) * kl(p, m) + a * kl(q, m)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 1.0])
def test_the_divergence_is_its_sum_and_so_is_its_gradient(share: float) -> None:
    np.testing.assert_allclose(
        generalised_jsd(jnp.asarray(P), jnp.asarray(Q), share), divergence(P, Q, share), atol=1e-6
    )
    assert np.abs(np.asarray(generalised_jsd(jnp.asarray(P), jnp.asarray(P), share))).max() < 1e-6
    found = jax.grad(lambda p: generalised_jsd(p, jnp.asarray(Q), share).sum())(jnp.asarray(P, jnp.float32))
    expected = finite_differences(lambda p: float(divergence(p, Q, share).sum()), P)
    np.testing.assert_allclose(found, expected, atol=2e-5)


def test_its_limits_are_the_two_divergences() -> None:
    for edge, near in ((0.0, 1e-5), (1.0, 1 - 1e-5)):
        scaled = divergence(P, Q, near) / (near * (1 - near))
        np.testing.assert_allclose(generalised_jsd(jnp.asarray(P), jnp.asarray(Q), edge), scaled, rtol=2e-3)


def test_the_rest_is_one_more_token() -> None:
    whole = with_rest(jnp.asarray(P[..., :3]))
    np.testing.assert_allclose(jnp.exp(whole), np.exp(P), atol=1e-6)
    nothing = with_rest(jnp.asarray(P))  # all tokens are there
    assert np.isfinite(nothing).all()
    assert float(jnp.exp(nothing)[..., -1].max()) < 1e-5
    assert np.isfinite(jax.grad(lambda p: generalised_jsd(with_rest(p), nothing).sum())(jnp.asarray(Q))).all()


def test_weights_of_the_worked_example() -> None:
    q = np.array([[0.97, 0.01, 0.01, 0.01], [0.25] * 4, [0.7, 0.1, 0.1, 0.1]])
    H = jnp.asarray(-(q * np.log(q)).sum(1))
    np.testing.assert_allclose(H, [0.167701, 1.386294, 0.940448], atol=1e-6)
    mask = jnp.ones(3, bool)
    np.testing.assert_allclose(confidence_weights(H, mask), [1.707079, 0.504690, 0.788231], atol=2e-6)
    np.testing.assert_allclose(confidence_weights(H, mask, 0.0), 1, atol=1e-6)
    assert not confidence_weights(H, ~mask).any()
    huge = confidence_weights(jnp.asarray([900.0, 901.0]), jnp.ones(2, bool))
    np.testing.assert_allclose(huge, 2 / (1 + np.exp([1.0, -1.0])[::-1]) * [1, 1], rtol=1e-5)


def test_only_failures_with_a_teacher_are_distilled() -> None:
    """(right, teacher): (1, 1), (1, 0), (0, 1), (0, 0); an unscored row is not distilled."""
    tokens = np.array([[1, 2], [-1, -1], [3, -1], [-1, -1], [3, 4]], float)
    reward = np.array([1.0, 1, 0, 0, np.nan])
    batch = batch_of(np.ones((5, 3), bool), reward, np.zeros((5, 3))).with_info(
        teacher_tokens=jnp.asarray(tokens), teacher_entropy=jnp.asarray(np.full((5, 3), 0.7))
    )
    found = route_failures().apply((), batch)[1]
    assert found.info["distilled"].tolist() == [0, 0, 1, 0, 0]
    np.testing.assert_allclose(found.info["distil_weight"], [[0] * 3, [0] * 3, [1] * 3, [0] * 3, [0] * 3], rtol=1e-6)


def test_numbers_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match="top of self_distillation is 0"):
        self_distillation(top=0)
    with pytest.raises(InputError, match=r"share of self_distillation is 1\.5"):
        self_distillation(share=1.5)
