"""Every family computes what transformers computes: logits, gradients, loss and greedy continuations."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from conftest import FAMILIES
from heavy import few

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.models.io.huggingface import to_tensors
from jaxrl_llm.sampling import completion_ids


def batch_of(ids: np.ndarray) -> Trajectories:
    """All tokens of each row but its first as actions."""
    N, L = ids.shape
    action = np.tile(np.arange(L) > 0, (N, 1))
    empty = jnp.zeros((N, L), jnp.float32)
    return Trajectories(
        tokens=jnp.asarray(ids, jnp.int32),
        token_mask=jnp.ones((N, L), bool),
        action_mask=jnp.asarray(action),
        behaviour_logp=empty,
        policy_step=empty.astype(jnp.int32),
        turn=jnp.where(action, 0, -1),
        group=jnp.arange(N),
        prompt_id=jnp.arange(N),
        truncated=jnp.zeros(N, bool),
        temperature=jnp.ones(N),
    )


def with_fused_experts(gradient: dict[str, np.ndarray], layers: int, experts: int) -> dict[str, np.ndarray]:
    """Names and layout of live transformers modules, where experts are stacked and gate and up are one matrix."""
    out = {k.replace("block_sparse_moe.", "mlp."): v for k, v in gradient.items() if ".experts." not in k}
    for layer in range(layers):
        for prefix, (gate, up, down) in (
            ("block_sparse_moe", ("w1", "w3", "w2")),
            ("mlp", ("gate_proj", "up_proj", "down_proj")),
        ):
            name = f"model.layers.{layer}.{prefix}.experts.{{}}.{{}}.weight"
            if name.format(0, gate) not in gradient:
                continue
            fused = [
                np.concatenate([gradient[name.format(e, gate)], gradient[name.format(e, up)]]) for e in range(experts)
            ]
            out[f"model.layers.{layer}.mlp.experts.gate_up_proj"] = np.stack(fused)
            out[f"model.layers.{layer}.mlp.experts.down_proj"] = np.stack(
                [gradient[name.format(e, down)] for e in range(experts)]
            )
    return out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_logits(family: str, side: str, vectors: Any) -> None:
    model = vectors(family)
    arrays = model.arrays
    mask, ids, expected = arrays["pad_mask"].astype(bool), arrays["pad_ids"], arrays["pad_logits"]
    if side == "right":
        shift = -np.argmax(mask, axis=1)
        mask, ids, expected = (
            np.stack([np.roll(row, s, axis=0) for row, s in zip(x, shift, strict=True)]) for x in (mask, ids, expected)
        )
    # Unpadded rows first: one program for all.
    tokens = np.concatenate([arrays["ids"], ids])
    real = np.concatenate([np.ones_like(mask), mask])
    logits = np.asarray(model.policy.logits(model.params, tokens, real))
    assert logits.dtype == np.float32
    assert np.abs(logits[:2] - arrays["logits_f64"]).max() < 1e-4
    assert np.abs(logits[:2] - arrays["logits"]).max() < 1e-4
    assert mask.sum() < mask.size
    assert np.abs(logits[2:] - expected)[mask].max() < 1e-4
    assert np.isfinite(logits).all()


def test_logits_do_not_see_what_padding_holds(vectors: Any) -> None:
    model = vectors("gemma2")
    mask = np.concatenate([np.ones((2, 24), bool), model.arrays["pad_mask"].astype(bool)])
    tokens = np.concatenate([model.arrays["ids"], model.arrays["pad_ids"]])
    other = np.where(mask, tokens, 17)
    logits = [np.asarray(model.policy.logits(model.params, x, mask)) for x in (tokens, other)]
    np.testing.assert_array_equal(logits[0][mask], logits[1][mask])


def test_logits_without_a_mask(vectors: Any) -> None:
    model = vectors("llama")
    tokens = np.concatenate([model.arrays["ids"]] * 2)
    np.testing.assert_array_equal(
        np.asarray(model.policy.logits(model.params, tokens)),
        np.asarray(model.policy.logits(model.params, tokens, np.ones_like(tokens))),
    )


def test_loss_and_gradients(family: str, vectors: Any, probe: Any) -> None:
    model = vectors(family)
    # Each row twice, at half the weight.
    batch = batch_of(np.concatenate([model.arrays["ids"]] * 2))
    weight = -np.asarray(batch.action_mask, np.float32) / np.asarray(batch.action_mask).sum()
    found = probe(model, batch, weights=(weight, np.zeros_like(weight)))
    assert (weight * found.logp).sum() == pytest.approx(float(model.arrays["loss"]), abs=1e-4)
    config = model.policy.config
    gradient = with_fused_experts(to_tensors(found.gradient, config), config.num_layers, config.num_experts)
    expected = {k.removeprefix("grad/"): v for k, v in model.arrays.items() if k.startswith("grad/")}
    assert gradient.keys() == expected.keys()
    for name, reference in expected.items():
        difference = np.abs(gradient[name] - reference).max()
        assert difference < 1e-4 * np.abs(reference).max(), name


@pytest.mark.parametrize("family", few(FAMILIES, ("qwen3_moe",)))
def test_greedy_continuation(family: str, vectors: Any, rollouts: Any) -> None:
    arrays = vectors(family).arrays
    prompt, expected = arrays["greedy_prompt"][0], arrays["greedy"][0]
    np.testing.assert_array_equal(expected[: len(prompt)], prompt)
    continued = completion_ids(rollouts(family, "greedy"))
    assert continued[0] == expected[len(prompt) :].tolist()
    assert continued[1] == continued[0]
