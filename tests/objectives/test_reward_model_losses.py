"""Losses of reward models are those of TRL and transformers, in values and gradients."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.objectives.functional import bradley_terry_loss, class_loss, multilabel_loss, regression_loss

FOLDER = Path(__file__).parents[1] / "reward_models"


def arrays(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / name / "vectors.npz") as file:
        return {key: file[key] for key in file.files}


@pytest.mark.parametrize(
    ("case", "with_margin", "centring"),
    [("plain", False, 0.0), ("margin", True, 0.0), ("center0.01", False, 0.01), ("margin_center0.1", True, 0.1)],
)
def test_pairs(case: str, with_margin: bool, centring: float) -> None:
    found = arrays("llama_1")
    chosen, rejected = (jnp.asarray(found[f"bt/rewards_{side}"]) for side in ("chosen", "rejected"))
    margin = jnp.asarray(found["bt/margin"]) if with_margin else 0.0
    loss = jnp.mean(bradley_terry_loss(chosen, rejected, margin, centring))
    assert float(loss) == pytest.approx(float(found[f"bt/{case}/loss"]), rel=1e-6)


def test_far_scores_have_finite_gradients() -> None:
    far = jnp.asarray([1e4, -1e4, 0.0])
    slope = jax.grad(lambda w: jnp.sum(bradley_terry_loss(w, jnp.zeros(3))))(far)
    np.testing.assert_allclose(slope, [0.0, -1.0, -0.5], atol=1e-7)
    swapped = bradley_terry_loss(-far, jnp.zeros(3)) - bradley_terry_loss(far, jnp.zeros(3))
    np.testing.assert_allclose(swapped, far)  # log sigmoid(x) - log sigmoid(-x) = x


def test_regression_and_classes() -> None:
    one, three = arrays("llama_1"), arrays("qwen3_3")
    scores, several = jnp.asarray(one["right/logits"]), jnp.asarray(three["right/logits"])
    for found, expected in [
        (regression_loss(scores, jnp.asarray(one["regression/labels"])[:, None]), one["regression/loss"]),
        (regression_loss(several, jnp.asarray(three["heads_regression/labels"])), three["heads_regression/loss"]),
        (class_loss(several, jnp.asarray(three["classes/labels"])), three["classes/loss"]),
        (multilabel_loss(several, jnp.asarray(three["multilabel/labels"])), three["multilabel/loss"]),
    ]:
        assert found.shape == (6,)
        assert float(jnp.mean(found)) == pytest.approx(float(expected), rel=1e-6)


def test_what_has_no_label_has_no_gradient() -> None:
    scores = jnp.asarray([[[1.0, 2.0], [3.0, -1.0], [0.5, 0.5]]])
    labels = jnp.asarray([[-100, 0, 1]])
    loss, slope = jax.value_and_grad(lambda s: jnp.sum(class_loss(s, labels)))(scores)
    assert float(loss) == pytest.approx(np.log1p(np.exp(-4.0)) + np.log(2.0), rel=1e-6)
    assert slope[0, 0].tolist() == [0.0, 0.0]
    np.testing.assert_allclose(slope[0, 2], [0.5, -0.5])
    targets = jnp.asarray([[1.0, jnp.nan]])
    slope = jax.grad(lambda s: jnp.sum(regression_loss(s, targets)))(jnp.asarray([[3.0, 3.0]]))
    np.testing.assert_allclose(slope, [[4.0, 0.0]])


def test_a_row_without_labels_costs_nothing() -> None:
    assert regression_loss(jnp.ones((1, 2)), jnp.full((1, 2), jnp.nan)).tolist() == [0.0]
