"""Temperatures by the level of the entropy: drawn from and trained on alike, against a loop in double precision."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.algorithms.credit.hapo_heterogeneous import BY_LEVEL, ENTRIES, Levels, temperature_factor
from jaxrl_llm.core.hooks import state_in
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.models import ModelConfig, Policy, init_params
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.models.packing import shared_prompts
from jaxrl_llm.sampling.draw import DrawSettings, draw
from jaxrl_llm.sampling.filters import Filters
from jaxrl_llm.utils.errors import InputError

LEVELS = Levels(0.1, 1.3, 0.8, -2.0, 0.4)  # tau is large, so that it matters
CONFIG = ModelConfig(
    family="llama", vocab_size=23, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=2, num_kv_heads=1,
    head_dim=8, norm_epsilon=1e-5, tie_embeddings=False, rope_of_layer=(0,), window_of_layer=(0,),
    query_scale=8**-0.5,
)  # fmt: skip
POLICY = Policy(CONFIG, remat=False)
PARAMS = init_params(jax.random.key(0), CONFIG, scale=0.7)


def log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def factor_loop(entropy: float, levels: Levels) -> float:
    z = (np.log(max(entropy, 1e-8)) - levels.pivot) / levels.deviation
    h = z / levels.top if z > 0 else z / -levels.bottom
    return 1 + levels.tau * min(max(h, -1), 1)


def heated_loop(logits: np.ndarray, T0: float, levels: Levels) -> np.ndarray:
    """Log-probabilities [N, V] at the temperatures of the rows."""
    out = []
    for z in logits.astype(np.float64):
        usual = log_softmax(z / T0)
        entropy = -(np.exp(usual) * usual).sum()
        out.append(log_softmax(z / (T0 * factor_loop(entropy, levels))))
    return np.array(out)


def draws(logits: np.ndarray, T0: float, levels: Levels | None, filters: Any = None) -> Any:
    N, V = logits.shape
    hook = None if levels is None else BY_LEVEL
    head = Policy(ModelConfig("llama", V, N, 1, 1, 1, 1, 1, 1e-6, False, "silu"), hook=hook)
    settings = DrawSettings(
        jnp.uint32(3), jnp.float32(T0), filters, None, jnp.asarray([-1], jnp.int32),
        None if levels is None else dict(zip(ENTRIES, map(jnp.float32, levels), strict=True)),
    )  # fmt: skip
    counters = jnp.stack([jnp.full(N, 3), jnp.zeros(N), jnp.zeros(N), jnp.arange(N)], axis=1).astype(jnp.uint32)
    run = jax.jit(draw, static_argnums=0)
    return run(head, {"unembed": jnp.asarray(logits.T, jnp.float32)}, jnp.eye(N), counters, settings)


@pytest.mark.parametrize("T0", [1.0, 0.8])
def test_a_token_is_drawn_at_the_temperature_of_its_entropy(T0: float) -> None:
    random = np.random.default_rng(0)
    logits = random.normal(size=(64, 12)) * np.linspace(0.1, 6, 64)[:, None]
    found, expected = draws(logits, T0, LEVELS), heated_loop(logits, T0, LEVELS)
    token = np.asarray(found.token)
    np.testing.assert_allclose(found.logp, expected[np.arange(64), token], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found.untruncated_logp, found.logp, atol=1e-5)
    np.testing.assert_allclose(found.entropy, -(np.exp(expected) * expected).sum(axis=1), rtol=1e-4, atol=1e-5)
    assert np.abs(np.asarray(draws(logits, T0, None).logp) - np.asarray(found.logp)).max() > 0.01


def test_without_a_strength_the_same_tokens_are_drawn() -> None:
    logits = 2 * np.random.default_rng(1).normal(size=(64, 12))
    plain, neutral = draws(logits, 1.0, None), draws(logits, 1.0, Levels())
    np.testing.assert_array_equal(plain.token, neutral.token)
    np.testing.assert_allclose(plain.logp, neutral.logp, atol=1e-6)


def test_filters_apply_to_the_heated_distribution() -> None:
    logits = 2 * np.random.default_rng(2).normal(size=(32, 12))
    found = draws(logits, 1.0, LEVELS, Filters(jnp.int32(3), jnp.float32(1.0), jnp.float32(0.0)))
    expected = heated_loop(logits, 1.0, LEVELS)
    top = np.sort(expected, axis=1)[:, -3:]
    chosen = expected[np.arange(32), np.asarray(found.token)]
    assert (chosen >= top[:, 0] - 1e-5).all()
    np.testing.assert_allclose(found.logp, chosen - np.log(np.exp(top).sum(axis=1)), rtol=1e-4, atol=1e-5)


@pytest.mark.heavy
def test_the_trainer_computes_what_was_drawn_from() -> None:
    random = np.random.default_rng(3)
    place, start, end = np.arange(9), np.array([3, 3, 4, 4])[:, None], np.array([8, 6, 9, 5])[:, None]
    tokens = random.integers(0, 23, (4, 9))
    tokens[1, :3], tokens[3, :4] = tokens[0, :3], tokens[2, :4]
    mask, zeros = (place >= start) & (place < end), jnp.zeros((4, 9), jnp.int32)
    rows = {name: jnp.full(4, value, jnp.float32) for name, value in zip(ENTRIES, LEVELS, strict=True)}
    batch = Trajectories(
        jnp.asarray(tokens, jnp.int32), jnp.asarray(place < end), jnp.asarray(mask), zeros * 0.0, zeros, zeros,
        jnp.asarray([0, 0, 1, 1]), jnp.asarray([0, 0, 1, 1]), jnp.zeros(4, bool), temperature=jnp.full(4, 0.9),
        info=rows | {"level_tau": jnp.asarray([0.4, 0.4, 0.4, jnp.nan])},
    )  # fmt: skip
    logits = np.asarray(POLICY.logits(PARAMS, batch.tokens, batch.token_mask), np.float64)[:, :-1].reshape(-1, 23)
    expected = np.pad(heated_loop(logits, 0.9, LEVELS).reshape(4, 8, 23), ((0, 0), (1, 0), (0, 0)))
    expected[3, 1:] = log_softmax(logits / 0.9).reshape(4, 8, 23)[3]  # of a group that failed
    chosen = np.take_along_axis(expected, tokens[..., None], axis=-1)[..., 0] * mask
    packed = shared_prompts(batch, group_size=2, prompt_length=4, completion_length=6)
    for packing in (None, packed):
        found = policy_outputs(replace(POLICY, hook=BY_LEVEL), PARAMS, batch, packing)
        np.testing.assert_allclose(found.logp, chosen, rtol=1e-4, atol=2e-5)
    # The temperature is a constant of the gradient.
    plain = batch.replace(info=None, temperature=jnp.full(4, 0.9))
    assert np.abs(np.asarray(policy_outputs(POLICY, PARAMS, plain).logp) - chosen).max() > 1e-3


def test_entries() -> None:
    with pytest.raises(InputError, match=r"no info\['level_pivot'\]: sample it with"):
        state_in(BY_LEVEL, None)
    with pytest.raises(InputError, match="level_pivot"):
        state_in(BY_LEVEL, {"level_tau": 1.0})
    assert state_in(BY_LEVEL, dict(zip(ENTRIES, LEVELS, strict=True))) == dict(zip(ENTRIES, LEVELS, strict=True))
    assert float(temperature_factor(jnp.float32(1.0), Levels())) == 1
