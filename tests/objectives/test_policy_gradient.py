"""The policy-gradient objective: worked numbers, its limit, and finite differences of the whole."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.objectives import clip, kl, policy_gradient, sequence_mean, token_mean, token_ratio
from jaxrl_llm.objectives.ratios import Ratio
from jaxrl_llm.utils.errors import InputError

MASK = np.array([[1, 1, 1], [1, 1, 0], [1, 0, 0], [1, 1, 1]], bool)
LOGP = np.array([[-0.9, -0.8, -1.5], [-0.6, -1.6, 0], [-0.25, 0, 0], [-1.2, -0.15, -1.4]])
OLD = np.array([[-1, -0.5, -2], [-0.7, -1.2, 0], [-0.3, 0, 0], [-1.5, -0.1, -0.9]])
REFERENCE = np.array([[-1.1, -0.6, -1.9], [-0.6, -1, 0], [-0.4, 0, 0], [-1.4, -0.2, -1.1]])
ADVANTAGES = 0.866024 * np.array([1, -1, -1, 1])[:, None] * MASK


def batch_of(**fields: Any) -> Trajectories:
    zeros, row = jnp.zeros(MASK.shape, jnp.int32), jnp.zeros(4, jnp.int32)
    batch = Trajectories(zeros, zeros == 0, jnp.asarray(MASK), jnp.asarray(OLD), zeros, zeros, row, row, row > 0)
    fields = {"advantages": ADVANTAGES, "reference_logp": REFERENCE, **fields}
    return batch.replace(**{name: None if value is None else jnp.asarray(value) for name, value in fields.items()})


def outputs_of(logp: Any) -> PolicyOutputs:
    return PolicyOutputs(jnp.asarray(logp), jnp.zeros(MASK.shape))


def objective(average: Any) -> Any:
    return policy_gradient(token_ratio(), clip(0.2, 0.2), average)


@pytest.mark.parametrize(
    ("whole", "loss"),
    [
        (objective(sequence_mean()), 0.014998),
        (objective(token_mean()), -0.273982),
        (objective(sequence_mean()) + 0.04 * kl(average=sequence_mean()), 0.016817),
    ],
)
def test_four_samples_by_hand(whole: Any, loss: float) -> None:
    assert float(whole(outputs_of(LOGP), batch_of())[0]) == pytest.approx(loss, abs=1.5e-6)


def test_metrics_are_token_means_whatever_the_average() -> None:
    for average in (token_mean(), sequence_mean()):
        _, metrics = objective(average)(outputs_of(LOGP), batch_of())
        # Ratios e^.1 e^-.3 e^.5 | e^.1 e^-.4 | e^.05 | e^.3 e^-.05 e^-.5; above 1.2 with A > 0 are two of nine,
        # below 0.8 with A < 0 is one.
        ratios = np.exp([0.1, -0.3, 0.5, 0.1, -0.4, 0.05, 0.3, -0.05, -0.5])
        assert float(metrics["ratio/mean"]) == pytest.approx(ratios.mean(), rel=1e-6)
        assert float(metrics["clip/high"]) == pytest.approx(2 / 9, rel=1e-6)
        assert float(metrics["clip/low"]) == pytest.approx(1 / 9, rel=1e-6)


def test_on_policy_it_is_reinforce() -> None:
    """d loss / d logp = -A / tokens, as of -sum(A logp) / tokens."""
    loss, gradient = jax.value_and_grad(lambda x: objective(token_mean())(outputs_of(x), batch_of())[0])(
        jnp.asarray(OLD)
    )
    assert float(loss) == pytest.approx(-ADVANTAGES.sum() / 9, abs=1e-7)
    np.testing.assert_allclose(gradient, -ADVANTAGES / 9, rtol=1e-6, atol=1e-9)


def test_on_policy_through_a_softmax_it_is_reinforce() -> None:
    """The same through the logits of a policy with four tokens, against -A (onehot - pi) / tokens."""
    random = np.random.default_rng(0)
    logits, tokens = random.normal(size=(4, 3, 4)), random.integers(0, 4, (4, 3))
    pi = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = -ADVANTAGES[..., None] * (np.eye(4)[tokens] - pi) / 9
    sampled = np.log(np.take_along_axis(pi, tokens[..., None], axis=-1))[..., 0]
    batch = batch_of(behaviour_logp=sampled.astype(np.float32))

    def loss(logits: jax.Array) -> jax.Array:
        logp = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(tokens)[..., None], axis=-1)[..., 0]
        # The ratio is 1 up to rounding, which must not trigger the clip.
        return objective(token_mean())(outputs_of(logp), batch)[0]

    found = jax.grad(loss)(jnp.asarray(logits, jnp.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def by_loop(logp: np.ndarray, weights: np.ndarray) -> float:
    """Sequence mean of the clipped surrogate plus 0.1 k3 in double precision."""
    means = []
    for i in range(4):
        total = count = 0.0
        for t in range(3):
            if MASK[i, t] and weights[i, t]:
                ratio, l = np.exp(logp[i, t] - OLD[i, t]), logp[i, t] - REFERENCE[i, t]
                gain = min(ratio * ADVANTAGES[i, t], np.clip(ratio, 0.8, 1.2) * ADVANTAGES[i, t])
                total += weights[i, t] * (-gain + 0.1 * (np.exp(-l) - 1 + l))
                count += weights[i, t]
        if count:
            means.append(total / count)
    return sum(means) / len(means)


def test_the_whole_by_finite_differences() -> None:
    weights = np.array([[1, 0.5, 0], [1, 1, 1], [0, 1, 1], [2, 1, 1]])
    whole = objective(sequence_mean()) + 0.1 * kl(average=sequence_mean())
    batch = batch_of(weights=weights)
    loss, gradient = jax.value_and_grad(lambda x: whole(outputs_of(x), batch)[0])(jnp.asarray(LOGP, jnp.float32))
    assert float(loss) == pytest.approx(by_loop(LOGP, weights), rel=1e-5)
    numeric = np.zeros((4, 3))
    for at in np.ndindex(4, 3):
        step = np.zeros((4, 3))
        step[at] = 1e-6
        numeric[at] = (by_loop(LOGP + step, weights) - by_loop(LOGP - step, weights)) / 2e-6
    np.testing.assert_allclose(gradient, numeric, rtol=1e-4, atol=1e-6)


def test_what_does_not_count_may_be_anything() -> None:
    weights = np.where(np.arange(12).reshape(4, 3) == 1, 0.0, 1.0)
    hole = ~MASK | (weights == 0)
    garbage = np.resize([np.nan, np.inf, -np.inf], (4, 3))
    clean = batch_of(weights=weights)
    dirty = batch_of(
        weights=np.where(MASK, weights, np.nan),
        advantages=np.where(hole, garbage, ADVANTAGES),
        behaviour_logp=np.where(hole, garbage, OLD),
        reference_logp=np.where(hole, garbage, REFERENCE),
    )
    whole = objective(sequence_mean()) + kl()

    def loss(logp: jax.Array, batch: Trajectories) -> Any:
        return whole(outputs_of(logp), batch)

    grad_fn = jax.value_and_grad(loss, has_aux=True)
    (value, metrics), gradient = grad_fn(jnp.asarray(LOGP), clean)
    (dirty_value, dirty_metrics), dirty_gradient = grad_fn(jnp.asarray(np.where(hole, garbage, LOGP)), dirty)
    assert np.isfinite(value)
    assert float(dirty_value) == float(value)
    assert {k: float(v) for k, v in dirty_metrics.items()} == {k: float(v) for k, v in metrics.items()}
    np.testing.assert_array_equal(dirty_gradient, gradient)


def test_a_ratio_that_tokens_share_is_safe_from_advantages_that_do_not_count() -> None:
    """If a row shares one ratio, a product with NaN on one token would make the gradients of all its tokens NaN."""

    def mean_ratio(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
        differences = jnp.where(batch.action_mask, outputs.logp - batch.behaviour_logp, 0.0)
        return jnp.exp(jnp.mean(differences, axis=1, keepdims=True)) * jnp.ones(MASK.shape)

    whole = policy_gradient(Ratio(mean_ratio), clip(), token_mean())
    dirty = batch_of(advantages=np.where(MASK, ADVANTAGES, np.nan))
    clean, found = (jax.grad(lambda x, b=b: whole(outputs_of(x), b)[0])(jnp.asarray(LOGP)) for b in (batch_of(), dirty))
    assert np.abs(clean).max() > 0.01
    np.testing.assert_array_equal(found, clean)


def test_it_needs_advantages() -> None:
    with pytest.raises(InputError, match="no advantages"):
        objective(token_mean())(outputs_of(LOGP), batch_of(advantages=None))


@pytest.mark.parametrize("against", ["behaviour", "old", "reference"])
def test_it_needs_what_its_ratio_is_against(against: str) -> None:
    whole = policy_gradient(token_ratio(against), clip(), token_mean())
    assert whole.needs == {f"{against}_logp"} - {"behaviour_logp"}
    with pytest.raises(InputError, match=f"{against}_logp"):
        whole(outputs_of(LOGP), batch_of().replace(**{f"{against}_logp": None}))


def test_parts_in_another_order_or_not_called_are_refused() -> None:
    ratio, surrogate, average = token_ratio(), clip(), token_mean()
    for wrong, message in (
        ((token_ratio, surrogate, average), "the ratio of policy_gradient must be.*token_ratio.*call it"),
        ((ratio, clip, average), "the surrogate of policy_gradient is the function clip, which makes one: call it"),
        (
            (ratio, surrogate, token_mean),
            "the average of policy_gradient is the function token_mean, which makes",
        ),
        (
            (surrogate, ratio, average),
            "the ratio of policy_gradient must be of the type Ratio, but is of .*Clip",
        ),
        ((ratio, average, surrogate), "the surrogate of policy_gradient.*the order is"),
        ((ratio, surrogate, "token"), "the average of policy_gradient is of the type str"),
    ):
        with pytest.raises(InputError, match=message):
            policy_gradient(*wrong)  # type: ignore[arg-type]
