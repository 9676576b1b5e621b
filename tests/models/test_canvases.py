"""Masked-diffusion models: LLaDA's forward pass in numpy, the canvases of a batch, and the bound on likelihoods."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.models.canvases import MASKED, canvases, draw_masks
from jaxrl_llm.models.config import Unmasking
from jaxrl_llm.models.families import from_hf, to_hf, unread_settings
from jaxrl_llm.models.io.huggingface import from_tensors, to_tensors
from jaxrl_llm.models.outputs import Wanted, policy_outputs
from jaxrl_llm.models.outputs.readings import elbo_terms
from jaxrl_llm.models.policy import Policy, init_params
from jaxrl_llm.utils.errors import InputError

RAW: dict[str, Any] = {
    "model_type": "llada", "architectures": ["LLaDAModelLM"], "d_model": 16, "n_heads": 4, "n_kv_heads": 2,
    "n_layers": 2, "mlp_hidden_size": 24, "vocab_size": 20, "embedding_size": 20, "max_sequence_length": 64,
    "rope_theta": 1000.0, "rms_norm_eps": 1e-5, "mask_token_id": 19, "eos_token_id": 1, "weight_tying": False,
    "activation_type": "silu", "block_type": "llama", "layer_norm_type": "rms", "rope": True, "include_bias": False,
    "block_length": 4, "alibi": False, "init_std": 0.02,
}  # fmt: skip
CONFIG = from_hf(RAW)
POLICY = Policy(CONFIG)
PARAMS = init_params(jax.random.key(0), CONFIG, scale=0.4)


def batch_of(lengths: tuple[int, ...] = (5, 2, 8), prompts: tuple[int, ...] = (3, 1, 2), width: int = 12) -> Any:
    random = np.random.default_rng(1)
    place = np.arange(width)
    first, size = np.array(prompts)[:, None], np.array(lengths)[:, None]
    known, action = place < first + size, (place >= first) & (place < first + size)
    N = len(lengths)
    return Trajectories(
        tokens=jnp.asarray(random.integers(2, 19, (N, width)), jnp.int32), token_mask=jnp.asarray(known),
        action_mask=jnp.asarray(action), behaviour_logp=jnp.zeros((N, width)),
        policy_step=jnp.zeros((N, width), jnp.int32), turn=jnp.where(jnp.asarray(action), 0, -1).astype(jnp.int32),
        group=jnp.zeros(N, jnp.int32), prompt_id=jnp.arange(N, dtype=jnp.int32), truncated=jnp.zeros(N, bool),
    )  # fmt: skip


def slow_logits(tokens: np.ndarray) -> np.ndarray:
    """f64[L, V]: LLaDA on the tensors of its files, every token seeing every other."""
    t = {name: np.asarray(x, np.float64) for name, x in to_tensors(PARAMS, CONFIG).items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * t[name + ".weight"]

    def heads(x: np.ndarray, name: str, count: int, turn: bool) -> np.ndarray:
        y = (x @ t[name + ".weight"].T).reshape(len(x), count, 4)
        if not turn:
            return y
        angle = np.arange(len(x))[:, None] * 1000.0 ** (-np.arange(2) / 2)
        cos, sin = (f(np.concatenate([angle, angle], 1))[:, None] for f in (np.cos, np.sin))
        return y * cos + np.concatenate([-y[..., 2:], y[..., :2]], -1) * sin

    x = t["model.transformer.wte.weight"][tokens]
    for layer in range(2):
        at = f"model.transformer.blocks.{layer}."
        y = norm(x, at + "attn_norm")
        q, k, v = (
            heads(y, at + n, c, r) for n, c, r in (("q_proj", 4, True), ("k_proj", 2, True), ("v_proj", 2, False))
        )
        logits = np.einsum("qhd,khd->hqk", q, np.repeat(k, 2, 1)) / 2
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", weights / weights.sum(-1, keepdims=True), np.repeat(v, 2, 1))
        x = x + out.reshape(len(x), 16) @ t[at + "attn_out.weight"].T
        y = norm(x, at + "ff_norm")
        gate = y @ t[at + "ff_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (y @ t[at + "up_proj.weight"].T)) @ t[at + "ff_out.weight"].T
    return norm(x, "model.transformer.ln_f") @ t["model.transformer.ff_out.weight"].T


def slow_logp(tokens: np.ndarray, targets: np.ndarray) -> np.ndarray:
    z = slow_logits(tokens)
    z = z - z.max(-1, keepdims=True)
    return (z - np.log(np.exp(z).sum(-1, keepdims=True)))[np.arange(len(targets)), targets]


def slow_canvas(batch: Any, row: int, masked: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A row's canvas, and the columns of its actions."""
    action = np.flatnonzero(np.asarray(batch.action_mask[row]))
    first, count = action[0], len(action)
    canvas = np.full(first + -(-count // 4) * 4, 19)
    canvas[: first + count] = np.asarray(batch.tokens[row])[: first + count]
    canvas[action[masked]] = 19
    return canvas, action


def test_it_is_the_model_of_its_files() -> None:
    tokens = np.array([5, 3, 19, 19, 7])
    np.testing.assert_allclose(POLICY.logits(PARAMS, jnp.asarray(tokens)[None])[0], slow_logits(tokens), atol=2e-5)
    padded = jnp.asarray([[0, 0, *tokens.tolist()]]), jnp.asarray([[False] * 2 + [True] * 5])
    np.testing.assert_allclose(POLICY.logits(PARAMS, *padded)[0, 2:], slow_logits(tokens), atol=2e-5)


def test_files_and_settings_are_read_back_equal() -> None:
    assert CONFIG.unmasking == Unmasking(19, 4, 2)
    written = to_hf(CONFIG)
    assert from_hf(written) == CONFIG
    assert written["d_model"] == 16
    assert "hidden_size" not in written
    tensors = {name: (lambda x=x: x) for name, x in to_tensors(PARAMS, CONFIG).items()}
    again = from_tensors(tensors, CONFIG, jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, again, PARAMS)
    assert "model.transformer.blocks.1.up_proj.weight" in tensors
    assert unread_settings(RAW) == ("init_std",)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [("block_type", "sequential", "only 'llama'"), ("mask_token_id", 20, "not in the vocabulary"),
     ("block_length", 0, "block_length"), ("alibi", True, "alibi")],
)  # fmt: skip
def test_what_is_another_model_is_refused(setting: str, value: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        from_hf(RAW | {setting: value})


def test_log_probabilities_are_of_all_actions_at_once_over_whole_blocks() -> None:
    batch = batch_of()
    found = policy_outputs(POLICY, PARAMS, batch)
    for row in range(3):
        canvas, action = slow_canvas(batch, row, np.ones(len(np.flatnonzero(batch.action_mask[row])), bool))
        targets = canvas.copy()
        targets[action] = np.asarray(batch.tokens[row])[action]
        np.testing.assert_allclose(found.logp[row, action], slow_logp(canvas, targets)[action], atol=2e-5)
    assert not np.asarray(found.logp)[~np.asarray(batch.action_mask)].any()


def test_masks_of_the_batch_leave_the_other_actions_known() -> None:
    batch = batch_of()
    masked = np.random.default_rng(2).uniform(size=(3, 12)) < 0.5
    found = policy_outputs(POLICY, PARAMS, batch.with_info(**{MASKED: jnp.asarray(masked, jnp.float32)}))
    for row in range(3):
        action = np.flatnonzero(np.asarray(batch.action_mask[row]))
        canvas, _ = slow_canvas(batch, row, masked[row, action])
        targets = canvas.copy()
        targets[action] = np.asarray(batch.tokens[row])[action]
        np.testing.assert_allclose(found.logp[row, action], slow_logp(canvas, targets)[action], atol=2e-5)


def test_terms_of_the_bound_are_a_slow_loop_over_their_masks() -> None:
    batch = batch_of()
    found = policy_outputs(POLICY, PARAMS, batch, None, Wanted(("elbo_terms",), masks=3)).extras
    assert found is not None
    for j in range(3):
        masks, t = map(np.asarray, draw_masks(batch, jnp.int32(j)))
        for row in range(3):
            action = np.flatnonzero(np.asarray(batch.action_mask[row]))
            canvas, _ = slow_canvas(batch, row, masks[row, action])
            targets = canvas.copy()
            targets[action] = np.asarray(batch.tokens[row])[action]
            slow = slow_logp(canvas, targets)[action][masks[row, action]].sum() / t[row]
            np.testing.assert_allclose(found["elbo_terms"][row, j], slow, rtol=2e-5, atol=1e-5)


def test_masks_are_of_their_share_and_do_not_depend_on_padding_or_order() -> None:
    batch = batch_of((8, 8, 8), (2, 2, 2))
    masks, t = jax.vmap(lambda n: draw_masks(batch, n))(jnp.arange(2000))
    assert np.asarray(t).mean() == pytest.approx(0.5, abs=0.02)
    assert np.corrcoef(np.asarray(masks).sum(-1).ravel(), np.asarray(t).ravel())[0, 1] > 0.8
    wide = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), (0, 5))) if x.ndim == 2 else x, batch)
    turned = jax.tree.map(lambda x: x[::-1], wide)
    again, same = draw_masks(turned, jnp.int32(7))
    np.testing.assert_array_equal(again[::-1, :12], masks[7])
    np.testing.assert_array_equal(same[::-1], t[7])
    other = draw_masks(batch.replace(policy_step=batch.policy_step + 1), jnp.int32(7))[1]
    assert not np.isclose(other, t[7]).any(), "each step has masks of its own"


def test_the_bound_of_two_tokens_has_its_closed_form() -> None:
    """The mean over t and masks of a response of two tokens is the mean over both orders, in closed form."""
    batch = batch_of((2,), (3,), 6)
    many = np.asarray(jax.jit(lambda b: elbo_terms(POLICY, PARAMS, b, 6000))(batch))[0]
    action = np.flatnonzero(np.asarray(batch.action_mask[0]))

    def logp(masked: tuple[bool, bool]) -> np.ndarray:
        canvas, _ = slow_canvas(batch, 0, np.array(masked))
        targets = canvas.copy()
        targets[action] = np.asarray(batch.tokens[0])[action]
        return slow_logp(canvas, targets)[action]

    both, first, second = logp((True, True)), logp((True, False)), logp((False, True))
    # E[1/t sum] = int_0^1 (t (l1 + l2) + (1 - t) (l1 | 2 + l2 | 1)) dt: half of each.
    exact = (both.sum() + first[0] + second[1]) / 2
    assert many.mean() == pytest.approx(exact, abs=float(4 * many.std() / 6000**0.5))


def test_memory_does_not_grow_with_the_samples_of_the_bound() -> None:
    batch = batch_of((8,) * 16, (4,) * 16, 12)
    policy = dataclasses.replace(POLICY, remat=True)

    def temporary(count: int) -> int:
        loss = jax.jit(jax.grad(lambda p: elbo_terms(policy, p, batch, count).sum()))
        found = loss.lower(PARAMS).compile().memory_analysis()
        return int(found.temp_size_in_bytes)

    assert temporary(16) < 1.05 * temporary(2)


def test_a_causal_model_has_no_bound() -> None:
    causal = Policy(dataclasses.replace(CONFIG, unmasking=None))
    with pytest.raises(InputError, match="masked-diffusion"):
        elbo_terms(causal, PARAMS, batch_of(), 2)


def test_canvases_end_with_whole_blocks() -> None:
    tokens, packing = canvases(batch_of(), Unmasking(19, 4))
    real = np.asarray(packing.prefixes.enter) > 0
    assert real.sum(axis=1).tolist() == [3 + 8, 1 + 4, 2 + 8]
    assert (np.asarray(tokens)[0, 3:11] == 19).all()
