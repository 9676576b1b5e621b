"""Process reward models: the loss against a loop, and the rows of TRL's PRMTrainer."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from batches import outputs_of, prepared, random_batch

from jaxrl_llm import algorithms
from jaxrl_llm.core.trajectory import with_totals


def test_process_reward_model_by_loop() -> None:
    batch, logp = random_batch(4, (2, 2))
    mask = np.asarray(batch.action_mask)
    turn = np.where(mask, np.cumsum(mask, axis=1) - 1, -1)
    labels = np.random.default_rng(0).integers(0, 2, (4, 6)).astype(float)
    labels[1, :] = np.nan
    labels[2, 0] = np.nan
    batch = batch.replace(
        turn=jnp.asarray(turn, jnp.int32), turn_rewards=jnp.asarray(labels, jnp.float32), reward=jnp.ones(4)
    )
    scores = np.random.default_rng(1).normal(size=(*logp.shape, 2))
    method = algorithms.get("process_reward_model")
    ready = with_totals(prepared(method, batch))

    def found(scores: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        return method.objective(outputs_of(logp).replace(extras={"scores": scores}), ready)

    known = [(n, t) for n, t in np.argwhere(mask) if not np.isnan(labels[n, turn[n, t]])]
    loss, slope, right = 0.0, np.zeros(scores.shape), 0
    for n, t in known:
        p = np.exp(scores[n, t]) / np.exp(scores[n, t]).sum()
        label = int(labels[n, turn[n, t]])
        loss -= np.log(p[label]) / len(known)
        slope[n, t] = (p - (np.arange(2) == label)) / len(known)
        right += p[label] > 0.5
    (value, metrics), gradient = jax.value_and_grad(found, has_aux=True)(jnp.asarray(scores, jnp.float32))
    assert float(value) == pytest.approx(loss, rel=1e-5)
    assert float(metrics["mean_token_accuracy"]) == pytest.approx(right / len(known))
    np.testing.assert_allclose(gradient, slope, atol=1e-6)


def test_fgaif_is_ppo_on_sub_sentence_rewards() -> None:
    """Advantages against a loop over the actions of each row, with the rewards of spans where these end."""
    batch, logp = random_batch(4, (2, 2))
    mask, rng = np.asarray(batch.action_mask), np.random.default_rng(2)
    spans = np.where(rng.random(logp.shape) < 0.4, rng.normal(size=logp.shape), 0.0) * mask
    reference = np.asarray(batch.behaviour_logp) + rng.normal(size=logp.shape) * 0.3 * mask
    values = rng.normal(size=logp.shape) * mask
    batch = batch.replace(
        token_rewards=jnp.asarray(spans, jnp.float32), reward=jnp.zeros(4), values=jnp.asarray(values, jnp.float32),
        reference_logp=jnp.asarray(reference, jnp.float32),
    )  # fmt: skip
    ready = prepared(algorithms.get("fgaif", kl_coefficient=0.1), batch)
    expected = np.zeros(logp.shape)
    for n in range(4):
        after, bootstrap = 0.0, 0.0
        for t in np.flatnonzero(mask[n])[::-1]:
            penalty = 0.1 * (float(batch.behaviour_logp[n, t]) - reference[n, t])
            after = spans[n, t] - penalty + bootstrap - values[n, t] + 0.95 * after
            expected[n, t], bootstrap = after, values[n, t]
    known = expected[mask]
    expected = np.where(mask, (expected - known.mean()) / known.std(ddof=1), 0.0)
    np.testing.assert_allclose(np.asarray(ready.advantages) * mask, expected, atol=1e-5)
