"""KL estimators by enumeration of a small distribution; the objectives made of them; the entropy bonus."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.preferences.drpo_decoupled_reward import hinged
from jaxrl_llm.core.log_ratios import ESTIMATORS
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.objectives import entropy, kl, sequence_mean
from jaxrl_llm.objectives.functional import k1, k2, k3
from jaxrl_llm.objectives.penalties import (
    entropy_corridor,
    entropy_target,
    exact_kl,
    imitation,
    likelihood_drop,
    likelihood_preserving,
    ratio_variance,
    right_answers,
)
from jaxrl_llm.utils.errors import InputError

PI, REF, OLD = np.array([0.3, 0.4, 0.1, 0.2]), np.array([0.6, 0.2, 0.15, 0.05]), np.array([0.25, 0.45, 0.1, 0.2])
FORWARD, REVERSE = 0.268764, 0.306027  # KL(ref || pi), KL(pi || ref)


def batch_of(shape: tuple[int, int], **fields: Any) -> Trajectories:
    zeros, row = jnp.zeros(shape, jnp.int32), jnp.zeros(shape[0], jnp.int32)
    fields = {name: jnp.asarray(value) for name, value in fields.items()}
    return Trajectories(zeros, zeros == 0, zeros == 0, jnp.zeros(shape), zeros, zeros, row, row, row > 0).replace(
        **fields
    )


def outputs_of(logp: Any, entropies: Any = None) -> PolicyOutputs:
    logp = jnp.asarray(logp)
    return PolicyOutputs(logp, jnp.zeros(logp.shape) if entropies is None else jnp.asarray(entropies))


def expected(estimator: str, logits: jax.Array, sampled_from: np.ndarray = PI, **options: Any) -> jax.Array:
    """The penalty over all four tokens, each weighted with the probability of being sampled."""
    logp = jax.nn.log_softmax(logits)[:, None]
    sources = {"reference_logp": np.log(REF)[:, None], "behaviour_logp": np.log(sampled_from)[:, None]}
    batch = batch_of((4, 1), weights=sampled_from[:, None], **sources)
    return kl(estimator=estimator, **options)(outputs_of(logp), batch)[0]


def test_values_by_hand() -> None:
    l = jnp.array([-0.3, 0.2, 1.0])
    np.testing.assert_array_equal(k1(l), l)
    np.testing.assert_allclose(k2(l), [0.045, 0.02, 0.5], rtol=1e-6)
    np.testing.assert_allclose(k3(l), [0.049859, 0.018731, 0.367879], rtol=0, atol=6e-7)


def test_k3_keeps_its_precision_near_zero_where_it_is_half_the_square() -> None:
    l = jnp.array([1e-3, -1e-3])
    np.testing.assert_allclose(k3(l), [5e-7 - 1e-9 / 6, 5e-7 + 1e-9 / 6], rtol=1e-3)
    assert float(k3(jnp.array(0.0))) == 0


@pytest.mark.parametrize(("estimator", "value"), [("k1", REVERSE), ("k2", 0.368560), ("k3", REVERSE)])
def test_expectation_under_the_policy(estimator: str, value: float) -> None:
    assert float(expected(estimator, jnp.log(PI))) == pytest.approx(value, abs=1e-6)
    assert float((PI * np.log(PI / REF)).sum()) == pytest.approx(REVERSE, abs=1e-6)


def test_expectation_under_an_older_policy() -> None:
    assert float(expected("k3", jnp.log(PI), OLD)) == pytest.approx(0.300342, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "gradient"),
    [
        ("k1", [0.0, 0.0, 0.0, 0.0]),  # zero-mean gradient: useless in a loss
        ("k2", [-0.299752, 0.154848, -0.071149, 0.216053]),  # of KL(pi || ref)
        ("k3", [-0.3, 0.2, -0.05, 0.15]),  # of KL(ref || pi): pi - ref
        ("k1+", [-0.299752, 0.154848, -0.071149, 0.216053]),
        ("k3+", [-0.299752, 0.154848, -0.071149, 0.216053]),
    ],
)
def test_gradient_by_enumeration(estimator: str, gradient: list[float]) -> None:
    found = jax.grad(lambda logits: expected(estimator, logits))(jnp.log(PI))
    np.testing.assert_allclose(found, gradient, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("estimator", "to_reference"), [("k2", False), ("k3", True)])
def test_which_divergence_the_gradient_is_of(estimator: str, to_reference: bool) -> None:
    """Central differences in double precision of the exact divergence."""

    def divergence(logits: np.ndarray) -> float:
        pi = np.exp(logits) / np.exp(logits).sum()
        p, q = (REF, pi) if to_reference else (pi, REF)
        return float((p * np.log(p / q)).sum())

    steps = 1e-6 * np.eye(4)
    exact = [(divergence(np.log(PI) + s) - divergence(np.log(PI) - s)) / 2e-6 for s in steps]
    found = jax.grad(lambda logits: expected(estimator, logits))(jnp.log(PI))
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-6)
    assert divergence(np.log(PI)) == pytest.approx(FORWARD if to_reference else REVERSE, abs=1e-6)


@pytest.mark.parametrize("to", ["behaviour", "old", "reference"])
def test_kl_to_each_source(to: str) -> None:
    sources = {"behaviour_logp": -1.5, "old_logp": -2.0, "reference_logp": -3.0}
    batch = batch_of((2, 2), **{name: np.full((2, 2), value) for name, value in sources.items()})
    objective = kl(to=to, estimator="k1")
    assert objective.needs == {f"{to}_logp"} - {"behaviour_logp"}, "every batch has the behaviour policy's"
    value, metrics = objective(outputs_of(np.full((2, 2), -1.0)), batch)
    assert float(value) == -1.0 - sources[f"{to}_logp"]
    assert metrics["kl"] is value


def test_the_average_is_a_choice() -> None:
    batch = batch_of((2, 2), reference_logp=np.zeros((2, 2)), weights=[[1.0, 1.0], [1.0, 0.0]])
    outputs = outputs_of([[1.0, 2.0], [6.0, 9.0]])
    assert float(kl(estimator="k1")(outputs, batch)[0]) == 3
    assert float(kl(estimator="k1", average=sequence_mean())(outputs, batch)[0]) == 3.75


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("size", [30.0, 1e4, np.inf])
def test_huge_log_ratios_are_finite(estimator: str, size: float) -> None:
    batch = batch_of((1, 2), reference_logp=[[-size, 0.0]])
    logp = jnp.array([[0.0, -size]])
    value, gradient = jax.value_and_grad(lambda x: kl(estimator=estimator)(outputs_of(x), batch)[0])(logp)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_what_does_not_count_does_not_leak() -> None:
    bad = np.array([[np.nan, -1.0, np.nan]])
    batch = batch_of((1, 3), reference_logp=bad, action_mask=[[False, True, True]], weights=[[1.0, 1.0, 0.0]])
    objective = kl() - 0.5 * entropy()
    loss = jax.value_and_grad(lambda logp, e: objective(outputs_of(logp, e), batch)[0], argnums=(0, 1))
    value, gradients = loss(jnp.array([[np.nan, -1.5, np.inf]]), jnp.array([[np.nan, 2.0, np.nan]]))
    assert float(value) == pytest.approx(np.exp(0.5) - 1 - 0.5 - 1.0, rel=1e-6)
    np.testing.assert_allclose(gradients[0], [[0, 1 - np.exp(0.5), 0]], rtol=1e-6)
    np.testing.assert_allclose(gradients[1], [[0, -0.5, 0]], rtol=1e-6)


def test_entropy_is_the_mean_of_what_the_policy_says() -> None:
    batch = batch_of((2, 2), weights=[[1.0, 1.0], [1.0, 0.0]])
    outputs = outputs_of(np.zeros((2, 2)), [[1.0, 2.0], [6.0, 9.0]])
    value, metrics = entropy()(outputs, batch)
    assert float(value) == float(metrics["entropy"]) == 3
    assert float(entropy(sequence_mean())(outputs, batch)[0]) == 3.75
    assert entropy().needs == frozenset()


def test_a_bonus_is_a_subtraction() -> None:
    """Descending on minus the entropy makes the distribution flatter: by enumeration of its logits."""

    def loss(logits: jax.Array) -> jax.Array:
        logp = jax.nn.log_softmax(logits)
        outputs = outputs_of(jnp.zeros((1, 1)), -jnp.sum(jnp.exp(logp) * logp).reshape(1, 1))
        return (0.0 * entropy() - entropy())(outputs, batch_of((1, 1)))[0]

    gradient = jax.grad(loss)(jnp.log(PI))
    entropy_of_pi = -(PI * np.log(PI)).sum()
    np.testing.assert_allclose(gradient, PI * (np.log(PI) + entropy_of_pi), rtol=0, atol=1e-6)


def test_unknown_names_are_refused_with_a_suggestion() -> None:
    with pytest.raises(InputError, match="did you mean 'k3'"):
        kl(estimator="k33")
    with pytest.raises(InputError, match="did you mean 'reference'"):
        kl(to="refernce")
    with pytest.raises(InputError, match="reference_logp, which the batch does not have"):
        kl()(outputs_of(np.zeros((1, 1))), batch_of((1, 1)))


@pytest.mark.parametrize("name", ["k1", "k2", "k3", "abs"])
def test_straight_through_has_the_value_of_the_estimator_and_the_gradient_of_k2(name: str) -> None:
    l = jnp.array([-0.3, 0.0, 0.2, 1.0])
    value, by = jax.vjp(ESTIMATORS[name + "+"], l)
    np.testing.assert_allclose(value, ESTIMATORS[name](l), rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(by(jnp.ones(4))[0], l, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_off_policy_the_weighted_estimate_and_its_gradient_are_exact(estimator: str) -> None:
    value, by = jax.value_and_grad(lambda x: expected(estimator, x, OLD, sampled="behaviour"))(jnp.log(PI))
    assert float(value) == pytest.approx(REVERSE, abs=1e-6)
    np.testing.assert_allclose(by, [-0.299752, 0.154848, -0.071149, 0.216053], rtol=0, atol=1e-6)


def test_reversed_estimates_are_of_the_other_direction_on_samples_of_the_other() -> None:
    for estimator in ("k1", "k3"):
        assert float(expected(estimator, jnp.log(PI), REF, reverse=True)) == pytest.approx(FORWARD, abs=1e-6)


def test_exact_divergences() -> None:
    logp, other = jnp.log(PI), jnp.log(REF)
    assert float(exact_kl(logp, other)) == pytest.approx(REVERSE, abs=1e-6)
    assert float(exact_kl(logp, other, reverse=True)) == pytest.approx(FORWARD, abs=1e-6)
    never = jnp.array([-jnp.inf, 0.0])
    value, by = jax.value_and_grad(exact_kl)(never, jnp.log(jnp.array([0.5, 0.5])))
    assert float(value) == pytest.approx(np.log(2), abs=1e-6)
    assert np.isfinite(by).all()


def test_entropies_outside_a_corridor() -> None:
    outputs = outputs_of(np.zeros((1, 3)), [[0.2, 1.0, 1.9]])
    batch = batch_of((1, 3)).with_controls(low=jnp.float32(0.5))
    value, metrics = entropy_corridor("low", 1.5)(outputs, batch)
    assert float(value) == pytest.approx((0.3 + 0.4) / 3)
    assert metrics["entropy/outside"] is value
    assert float(entropy_target(1.0)(outputs, batch)[0]) == pytest.approx((0.8 + 0.9) / 3)


def test_a_hinged_penalty_counts_above_its_limit_only() -> None:
    batch = batch_of((1, 2), reference_logp=[[-1.0, -1.0]])

    def loss(logp: jax.Array, limit: float) -> jax.Array:
        return hinged(kl(estimator="k2"), limit, 3.0)(outputs_of(logp), batch)[0]

    logp = jnp.array([[-1.0, 0.0]])  # k2: 0 and 0.5, mean 0.25
    assert float(loss(logp, 0.3)) == 0
    value, by = jax.value_and_grad(loss)(logp, 0.05)
    assert float(value) == pytest.approx(3.0 * 0.2 * 0.25)
    np.testing.assert_allclose(by, [[0.0, 3.0 * 0.2 * 0.5]], rtol=1e-6)


def test_falls_are_gated_by_the_sum_over_their_span() -> None:
    batch = batch_of((1, 4), turn=[[0, 0, 1, 1]])
    d = jnp.array([[0.2, -0.3, 0.3, -0.1]])
    for gate, found in {"turn": [0, 0, 0.3, 0], "sequence": [0.2, 0, 0.3, 0], "token": [0.2, 0, 0.3, 0]}.items():
        np.testing.assert_allclose(likelihood_drop(d, batch, gate), [found], atol=1e-7)
    np.testing.assert_array_equal(likelihood_drop(jnp.full((1, 4), 1e-6), batch, "token"), 0, "rounding is no fall")
    good = batch.replace(advantages=jnp.ones((1, 4)), old_logp=batch.behaviour_logp)
    value, metrics = likelihood_preserving("sequence", final=0.5)(outputs_of(-d), good)
    assert float(value) == pytest.approx((0.2 + 0.15) / 4)
    assert metrics["likelihood/fallen"] is value
    assert float(likelihood_preserving()(outputs_of(-d), good.replace(advantages=-jnp.ones((1, 4))))[0]) == 0


def test_imitation_of_right_answers() -> None:
    batch = batch_of((2, 2), reward=[1.0, 0.0])
    outputs = outputs_of([[-1.0, -2.0], [-3.0, -5.0]])
    assert float(imitation()(outputs, batch)[0]) == 11 / 4
    assert float(imitation(right_answers())(outputs, batch)[0]) == 3 / 4
    unscored = batch.replace(reward=jnp.array([1.0, jnp.nan]))
    assert float(imitation(right_answers())(outputs, unscored)[0]) == 3 / 4


def test_the_variance_of_ratios() -> None:
    outputs = outputs_of(np.log([[0.8, 1.0, 1.25, 2.0]]))
    value, metrics = ratio_variance(limit=0.04)(outputs, batch_of((1, 4)))
    assert float(metrics["ratio/variance"]) == pytest.approx(0.275625, abs=1e-6)
    assert float(value) == pytest.approx(0.235625, abs=1e-6)
    assert float(ratio_variance(limit=0.04)(outputs, batch_of((1, 4), weights=np.zeros((1, 4))))[0]) == 0
