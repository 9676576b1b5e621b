"""Jet-RL: the policy is that of products in numpy, sampler and update agree, and runs take the settings it needs."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from conftest import quick_compiles

from jaxrl_llm import algorithms, sample
from jaxrl_llm.models.layers import projections
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.models.quantised import BLOCKS, BlockRounding, quantise_blocks
from jaxrl_llm.models.quantised.layers import cast
from jaxrl_llm.sampling.weights import take_weights
from jaxrl_llm.utils.errors import InputError

SIZE, MOST = 16, 448.0  # blocks of which the tiny model's matrices have several
TOKENS = jnp.asarray([[3, 5, 7, 9, 11, 2, 4, 8], [3, 5, 9, 1, 2, 6, 6, 6]])


def rounded(a: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """The numbers that blocks of a matrix stand for, by a loop over blocks, and the cast of another library."""
    out = np.zeros(a.shape)
    for i in range(0, a.shape[0], rows):
        for j in range(0, a.shape[1], columns):
            block = a[i : i + rows, j : j + columns]
            scale = np.abs(block).max() / np.float32(MOST) or np.float32(1)
            eight = np.clip(block / scale, -MOST, MOST).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
            out[i : i + rows, j : j + columns] = eight * np.float64(scale)
    return out


@jax.custom_vjp
def by_numpy(x: Any, w: Any) -> Any:
    return _called(lambda x, w: rounded(x, 1, SIZE) @ rounded(w, SIZE, SIZE), (len(x), w.shape[1]), x, w)


def _called(make: Any, shape: tuple[int, ...], *arrays: Any) -> Any:
    def wide(*given: Any) -> np.ndarray:
        return np.asarray(make(*map(np.asarray, given)), np.float32)

    return jax.pure_callback(wide, jax.ShapeDtypeStruct(shape, jnp.float32), *arrays)


def _gradients(saved: Any, dy: Any) -> Any:
    x, w = saved
    dx = _called(lambda dy, w: rounded(dy, 1, SIZE) @ rounded(w, SIZE, SIZE).T, x.shape, dy, w)
    return dx, _called(lambda x, dy: rounded(x, SIZE, 1).T @ rounded(dy, SIZE, 1), w.shape, x, dy)


by_numpy.defvjp(lambda x, w: (by_numpy(x, w), (x, w)), _gradients)


@pytest.mark.heavy
def test_it_is_the_model_of_rounded_products(vectors: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities and gradients of all weights are those of the model whose products are a loop over blocks."""
    monkeypatch.setitem(BLOCKS, "float8_blocks", BlockRounding("float8", SIZE))
    model = vectors("qwen3")
    policy = dataclasses.replace(model.policy, rounding="float8_blocks", remat=False)

    def total(params: Any, own: Any) -> Any:
        hidden, _ = own.forward(params, TOKENS, jnp.arange(8)[None].repeat(2, 0), jnp.ones_like(TOKENS))
        logp = jax.nn.log_softmax(own.logits_of(params, hidden))
        return logp[:, :, 5].sum(), logp

    def both(own: Any) -> Any:
        (_, logp), gradient = jax.value_and_grad(total, has_aux=True)(model.params, own)
        return logp, gradient

    (exact, plain), (found, gradient) = both(dataclasses.replace(policy, rounding=None)), both(policy)

    def product(x: Any, weight: Any) -> Any:
        return by_numpy(x, weight.weight.reshape(x.shape[1], -1))

    monkeypatch.setattr(projections, "matrix_product", product)
    expected, slopes = both(policy)
    # A number that float32's own differences put on the other side of a step moves others by a sixteenth of itself.
    error, effect = (np.abs(found - other).mean() for other in (expected, exact))
    assert effect > 1e-3
    assert error < 0.02 * effect
    for a, b, c in zip(*map(jax.tree.leaves, (gradient, slopes, plain)), strict=True):
        if np.abs(a - c).mean() > 1e-5:
            assert np.abs(a - b).mean() < 0.05 * np.abs(a - c).mean()


def mismatches(policy: Any, params: Any, **how: Any) -> np.ndarray:
    """|log-probability in the update - in the sampler| of 4 x 16 sampled tokens."""
    with quick_compiles():
        batch = sample(
            policy, params, [[3, 5, 7, 9, 11, 2, 4, 8], [3, 5, 9, 1, 2]], jax.random.key(0), group_size=2,
            max_new_tokens=16, stop_token_ids=[], **how,
        )  # fmt: skip
        outputs = policy_outputs(policy, params, batch)
    return np.abs(np.asarray(outputs.logp - batch.behaviour_logp))[np.asarray(batch.action_mask)]


@pytest.mark.heavy
def test_sampler_and_update_compute_one_policy(vectors: Any) -> None:
    """In bfloat16 with float32 states, but for tokens after an activation that fell on the other side of a step.

    Weights that are rounded in the sampler alone put every token off.
    """
    model = vectors("qwen3")
    policy = dataclasses.replace(model.policy, dtype=jnp.dtype(jnp.bfloat16), activations=jnp.dtype(jnp.float32))
    same = mismatches(dataclasses.replace(policy, rounding="float8_blocks"), model.params)
    mixed = mismatches(policy, model.params, weight_dtype="float8_blocks")
    assert np.median(same) < 1e-4
    assert same.mean() < 0.2 * mixed.mean()
    assert np.median(mixed) > 1e-2


def test_both_sides_round_weights_to_the_same_bits(vectors: Any) -> None:
    """Each in its own program, from float32 parameters that are computed with in bfloat16."""
    model = vectors("qwen3")
    layer = jax.tree.map(lambda x: x[0], model.params["layers"])
    for kind in BLOCKS:
        policy = dataclasses.replace(model.policy, dtype=jnp.dtype(jnp.bfloat16), rounding=kind)
        sampled = take_weights(policy, model.params).loop["layers"][0]
        rounded = jax.jit(lambda layer, how=BLOCKS[kind]: quantise_blocks(cast(layer, jnp.bfloat16)["gate"], how))(
            layer
        )
        by_hand = quantise_blocks(layer["gate"].astype(jnp.bfloat16), BLOCKS[kind])
        for found in (sampled["gate"], rounded):
            np.testing.assert_array_equal(found.values.astype(jnp.float32), by_hand.values.astype(jnp.float32))
            np.testing.assert_array_equal(found.scale, by_hand.scale)


def test_its_loss_is_that_of_grpo() -> None:
    assert repr(algorithms.get("jet_rl")) == repr(algorithms.get("grpo", kl_coefficient=0.0))


def test_models_with_other_products_are_refused(vectors: Any) -> None:
    model = vectors("qwen3_moe")
    policy = dataclasses.replace(model.policy, rounding="float8_blocks")
    with pytest.raises(InputError, match=r"float8_blocks rounds .* has experts: give weight_dtype float8, or another"):
        policy.logits(model.params, TOKENS)
