"""The decoder's parts against numpy loops, and the invariances of the whole."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_llm.models import decoder, init_params, parameter_count
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.forward import empty_cache
from jaxrl_llm.models.forward import forward as forward_pass
from jaxrl_llm.models.layers import attention
from jaxrl_llm.models.layers.moe import expert_mlp
from jaxrl_llm.models.layers.projections import keep_projections
from jaxrl_llm.models.policy import Policy, positions_of
from jaxrl_llm.models.stacks import unstack

CONFIG = ModelConfig(
    family="llama",
    vocab_size=13,
    hidden_size=8,
    intermediate_size=12,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    norm_epsilon=1e-5,
    tie_embeddings=True,
    rope_of_layer=(0, 0),
    window_of_layer=(3, 0),
    query_scale=6**-0.5,
)


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def weighing(config: ModelConfig) -> attention.Weighing:
    return attention.Weighing(0, config.query_scale, config.attention_softcap)


def silu(gate: jax.Array, up: jax.Array) -> jax.Array:
    return jax.nn.silu(gate) * up


def test_rms_norm() -> None:
    config = dataclasses.replace(CONFIG, norm_epsilon=0.5, norm_offset=1.0)
    # The mean square of (1, 3) is 5: divide by sqrt(5.5), multiply by 1 + weight.
    found = attention.norm(jnp.asarray([1.0, 3.0]), jnp.asarray([0.0, 1.0]), config)
    np.testing.assert_allclose(found, [1 / math.sqrt(5.5), 6 / math.sqrt(5.5)], rtol=1e-6)


@pytest.mark.parametrize("softcap", [0.0, 0.7])
def test_attention_by_loop(softcap: float) -> None:
    config = dataclasses.replace(CONFIG, attention_softcap=softcap)
    N, L, S, H, K, h = 2, 3, 5, 4, 2, 6
    q, k, v = draw(0, N, L, H, h), draw(1, N, K, S, h), draw(2, N, K, S, h)
    visible = np.random.default_rng(3).random((N, L, S)) < 0.6
    visible[:, :, 0] = True
    found = np.asarray(attention.attention(*map(jnp.asarray, (q, k, v, visible)), weighing(config)))
    for n in range(N):
        for l in range(L):
            for head in range(H):
                keys = k[n, head // 2].astype(np.float64)
                logits = keys @ q[n, l, head] / math.sqrt(h)
                if softcap:
                    logits = softcap * np.tanh(logits / softcap)
                weights = np.where(visible[n, l], np.exp(logits), 0.0)
                expected = weights @ v[n, head // 2] / weights.sum()
                np.testing.assert_allclose(found[n, l, head], expected, atol=1e-5)


def test_queries_in_blocks_are_those_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    N, L, S, H, K, h = 2, 150, 9, 4, 2, 6
    q, k, v = (jnp.asarray(draw(i, *shape)) for i, shape in enumerate([(N, L, H, h), (N, K, S, h), (N, K, S, h)]))
    number = jnp.asarray(np.random.default_rng(3).integers(0, S, (N, L)))

    def sees(number: jax.Array) -> jax.Array:
        return jnp.arange(S) <= number[..., None]

    whole = attention.attention(q, k, v, sees(number), weighing(CONFIG))
    monkeypatch.setattr(attention, "MAX_LOGITS", 1)
    for of_block in (None, (number, sees)):
        np.testing.assert_allclose(
            attention.attention(q, k, v, sees(number), weighing(CONFIG), of_block), whole, atol=1e-6
        )


def test_a_token_that_sees_nothing_stays_finite() -> None:
    params = init_params(jax.random.key(0), CONFIG)
    tokens = jnp.ones((1, 4), jnp.int32)
    segments = jnp.zeros((1, 4), jnp.int32)

    def loss(params: Any) -> jax.Array:
        return forward_pass(params, CONFIG, tokens, segments, segments)[0].sum()

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    assert np.isfinite(value)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


@pytest.mark.parametrize("normalise", [False, True])
def test_experts_by_loop(normalise: bool) -> None:
    config = dataclasses.replace(CONFIG, num_experts=5, experts_per_token=2, normalise_router=normalise)
    T, D, E, F = 7, 8, 5, 12
    x = draw(0, T, D)
    layer = {"router": draw(1, D, E), "gate": draw(2, E, D, F), "up": draw(3, E, D, F), "down": draw(4, E, F, D)}
    layer["router"][:, 3] = 0.0
    x[0] = 0.0  # all experts are equally good for this one
    found = np.asarray(expert_mlp(jnp.asarray(x), jax.tree.map(jnp.asarray, layer), config, silu))
    for t in range(T):
        logits = x[t].astype(np.float64) @ layer["router"]
        probability = np.exp(logits) / np.exp(logits).sum()
        best = np.argsort(-probability, kind="stable")[:2]
        share = probability[best] / (probability[best].sum() if normalise else 1.0)
        expected = np.zeros(D)
        for weight, e in zip(share, best, strict=True):
            gate = x[t] @ layer["gate"][e]
            expected += weight * ((gate / (1 + np.exp(-gate)) * (x[t] @ layer["up"][e])) @ layer["down"][e])
        np.testing.assert_allclose(found[t], expected, rtol=1e-4, atol=1e-4)


@pytest.fixture(scope="module")
def forward() -> Any:
    return jax.jit(forward_pass, static_argnums=1, static_argnames=("dtype", "remat"))


@pytest.mark.parametrize("family", ["gemma2", "qwen3_moe"])
def test_unrolled_layers_are_the_same(family: str, vectors: Any, forward: Any) -> None:
    model = vectors(family)
    tokens = jnp.asarray(model.arrays["ids"])
    ones = jnp.ones_like(tokens)
    scanned, _ = forward(model.params, model.policy.config, tokens, positions_of(ones), ones)
    split = unstack(model.params, model.policy.config)
    assert len(split["layers"]) == model.policy.config.num_layers
    assert unstack(split, model.policy.config) is split
    unrolled, _ = forward(split, model.policy.config, tokens, positions_of(ones), ones)
    np.testing.assert_allclose(scanned, unrolled, atol=2e-5)


@pytest.mark.heavy
@pytest.mark.parametrize("stacked", [False, True])
def test_a_cache_in_pieces_is_the_whole(stacked: bool, vectors: Any, forward: Any) -> None:
    """Prefill with padding in the middle of the slots, and go on in two pieces."""
    model = vectors("gemma2")
    config, params = model.policy.config, model.params if stacked else unstack(model.params, model.policy.config)
    ids = np.asarray(model.arrays["ids"])[:, :20]
    whole, _ = forward(model.params, config, jnp.asarray(ids), *_marks(20))
    lengths = [11, 8]
    prompts = np.zeros((2, 11), np.int32)
    for row, length in enumerate(lengths):
        prompts[row, :length] = ids[row, :length]
    mask = jnp.asarray(np.arange(11) < np.asarray(lengths)[:, None], jnp.int32)
    cache = empty_cache(config, 2, 20, jnp.float32, stacked)
    first, cache = forward(params, config, jnp.asarray(prompts), positions_of(mask), mask, cache)
    found = []
    for begin, end in ((0, 4), (4, 9)):
        places = [np.arange(length + begin, length + end) for length in lengths]
        tokens = np.stack([ids[row, place] for row, place in enumerate(places)])
        hidden, cache = forward(params, config, tokens, np.stack(places).astype(np.int32), np.ones_like(tokens), cache)
        found.append(hidden)
    later = np.concatenate(found, axis=1)
    assert int(cache.length) == 20
    for row, start in enumerate(lengths):
        np.testing.assert_allclose(later[row], whole[row, start : start + 9], atol=3e-5)
        np.testing.assert_allclose(first[row, :start], whole[row, :start], atol=3e-5)


def _marks(length: int) -> tuple[jax.Array, jax.Array]:
    """Positions and segments of two whole rows."""
    ones = jnp.ones((2, length), jnp.int32)
    return positions_of(ones), ones


def test_segments_do_not_see_each_other(vectors: Any, forward: Any) -> None:
    """Two sequences packed into a row equal the two alone."""
    model = vectors("llama")
    config, ids = model.policy.config, model.arrays["ids"]
    alone = [forward(model.params, config, jnp.asarray(ids[:, :10]), *_marks(10))[0]]
    packed = np.stack([np.concatenate([ids[0, :10], ids[1, :10]])] * 2)
    positions = np.tile(np.arange(10), (2, 2)).astype(np.int32)
    segments = np.tile(np.repeat([1, 2], 10), (2, 1)).astype(np.int32)
    hidden, _ = forward(model.params, config, packed, positions, segments)
    np.testing.assert_allclose(hidden[0, :10], alone[0][0], atol=2e-5)
    np.testing.assert_allclose(hidden[0, 10:], alone[0][1], atol=2e-5)


def test_a_window_hides_what_is_farther() -> None:
    """With a window of 3 in the only layer, a token depends on itself and two before, and on nothing else."""
    config = dataclasses.replace(CONFIG, num_layers=1, rope_of_layer=(0,), window_of_layer=(3,))
    params = init_params(jax.random.key(0), config, scale=0.7)
    tokens = np.arange(8, dtype=np.int32)[None]
    policy = Policy(config)
    base = np.asarray(policy.logits(params, tokens))[0]
    for changed in range(8):
        other = tokens.copy()
        other[0, changed] = 12
        moved = np.abs(np.asarray(policy.logits(params, other))[0] - base).max(axis=-1) > 1e-5
        assert moved.tolist() == [changed <= place < changed + 3 for place in range(8)]


@pytest.mark.heavy
def test_rematerialisation_changes_nothing(vectors: Any) -> None:
    model = vectors("gemma3")
    tokens = jnp.asarray(model.arrays["ids"])[:, :8]

    def loss(params: Any, remat: decoder.Remat) -> jax.Array:
        return (model.policy.forward(params, tokens, *_marks(8), remat=remat)[0] ** 2).sum()

    gradient = jax.jit(jax.grad(loss), static_argnums=1)
    some = keep_projections
    without = gradient(model.params, False)
    for remat in (True, some):
        for a, b in zip(*map(jax.tree.leaves, (gradient(model.params, remat), without)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4 * np.abs(b).max())
    # What is kept needs not be worked out again; layers are unrolled, as a loop is counted once.
    split = unstack(model.params, model.policy.config)
    work = [gradient.lower(split, remat).compile().cost_analysis()["flops"] for remat in (True, some, False)]
    assert work[0] > 1.1 * work[1] > 1.1 * 0.99 * work[2]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_projections_that_are_kept_are_not_computed_again(dtype: Any) -> None:
    """By the products in TPU programs. Of seven projections six are needed again: the last one is only added."""
    policy = Policy(CONFIG, dtype=dtype)
    params = init_params(jax.random.key(0), CONFIG, dtype=dtype)

    def products(remat: decoder.Remat) -> int:
        def loss(params: Any) -> jax.Array:
            return (
                policy.forward(params, jnp.ones((2, 8), int), *_marks(8), remat=remat)[0].astype(jnp.float32) ** 2
            ).sum()

        lowered = jax.jit(jax.grad(loss)).trace(params).lower(lowering_platforms=("tpu",))
        return lowered.as_text().count("dot_general")

    again, kept, stored = (products(remat) for remat in (True, keep_projections, False))
    assert again - kept == 6
    assert stored <= kept


def test_positions_count_real_tokens() -> None:
    mask = jnp.asarray([[0, 0, 1, 1, 1], [1, 1, 0, 0, 1], [0, 0, 0, 0, 0]])
    assert positions_of(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 1, 1, 2], [0, 0, 0, 0, 0]]


def test_fresh_parameters() -> None:
    config = dataclasses.replace(CONFIG, norm_offset=1.0, attention_bias=True, tie_embeddings=False)
    params = init_params(jax.random.key(0), config, dtype=jnp.bfloat16, scale=0.1)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    assert not params["final_norm"].any()  # 1 + 0: the identity
    assert not params["layers"]["query_bias"].any()
    assert 0.05 < float(params["layers"]["gate"].astype(jnp.float32).std()) < 0.15
    # Two matrices of 13 x 8, one norm of 8, and per layer: two norms, query and out of 8 x 24, key and value of 8 x 12,
    # their biases of 24 + 12 + 12, three matrices of 8 x 12.
    layer = 2 * 8 + 2 * 8 * 24 + 2 * 8 * 12 + 48 + 3 * 8 * 12
    assert parameter_count(params) == 2 * 13 * 8 + 8 + 2 * layer


def test_bfloat16_is_close(vectors: Any) -> None:
    """Computing in bfloat16 gives the same logits to its three digits, in float32."""
    model = vectors("llama")
    half = dataclasses.replace(model.policy, dtype=jnp.dtype(jnp.bfloat16))
    tokens = np.concatenate([model.arrays["ids"]] * 2)
    logits = half.logits(model.params, tokens)
    assert logits.dtype == jnp.float32
    error = np.abs(np.asarray(logits)[:2] - model.arrays["logits"])
    assert error.max() > 1e-4
    assert error.mean() < 0.05
