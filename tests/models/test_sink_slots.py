"""Sink slots: attention with them is a slow loop, sampler and trainer agree, and what cannot have them is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import quick_compiles
from heavy import few

from jaxrl_llm import sample, save_policy
from jaxrl_llm.models.by_row import check_members
from jaxrl_llm.models.layers.attention import Weighing, attention
from jaxrl_llm.models.layers.packed_attention import by_kernel, causal_tokens
from jaxrl_llm.models.layers.sink_slots import Slots
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.models.packing import shared_prompts
from jaxrl_llm.models.policy import parameter_count, with_sink_slots
from jaxrl_llm.plan.models import config_of
from jaxrl_llm.sampling.kv_cache import pack
from jaxrl_llm.sampling.speculative.verify import _attend
from jaxrl_llm.utils.errors import InputError

N, L, H, K, SIZE, SCALE = 2, 7, 4, 2, 8, 0.4
LENGTH = (7, 5)


class Heads(NamedTuple):
    """Of one layer: queries [N, L, H, h], keys and values [N, L, K, h], slots [K, n, h], and sinks [H]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    slot_k: np.ndarray
    slot_v: np.ndarray
    sinks: np.ndarray


def drawn(n: int, spread: float = 1.0) -> Heads:
    random = np.random.default_rng(n)
    shapes = ((N, L, H, SIZE), (N, L, K, SIZE), (N, L, K, SIZE), (K, n, SIZE), (K, n, SIZE), (H,))
    q, k, v, *slots, sinks = (random.normal(size=shape) for shape in shapes)
    return Heads(q, k, v, *(spread * x for x in slots), sinks)


def looped(x: Heads, window: int, softcap: float, sinks: bool) -> np.ndarray:
    """Attention in float64, a query at a time: to the tokens before it in its window, and to all slots."""
    out = np.zeros(x.q.shape)
    for i, t, head in np.ndindex(N, L, H):
        own = head // (H // K)
        first = max(0, t - window + 1) if window else 0
        keys = [*x.slot_k[own], *x.k[i, first : t + 1, own]]
        values = [*x.slot_v[own], *x.v[i, first : t + 1, own]]
        logits = SCALE * np.array([x.q[i, t, head] @ key for key in keys])
        weights = np.exp(softcap * np.tanh(logits / softcap) if softcap else logits)
        total = weights.sum() + (np.exp(x.sinks[head]) if sinks else 0)
        out[i, t, head] = sum(w * value for w, value in zip(weights, values, strict=True)) / total
    return out


def attended(kind: str, x: Any, window: int, softcap: float, sinks: bool) -> jax.Array:
    """The library's: by masks, or by the kernel for packed rows."""
    how = Weighing(window, SCALE, softcap, x.sinks if sinks else None, Slots(x.slot_k, x.slot_v))
    if kind == "kernel":
        tokens = causal_tokens(jnp.asarray(LENGTH), L)
        config = dataclasses.replace(config_of("tests/vectors/llama"), window_of_layer=(window,))
        return by_kernel(config, tokens, L * L, None)(x.q, x.k, x.v, None, how)[0]
    age = np.arange(L)[:, None] - np.arange(L)
    near = (age >= 0) & ((age < window) if window else True)
    seen = jnp.asarray(near & (np.arange(L) < np.array(LENGTH)[:, None])[:, None])
    return attention(x.q, x.k.swapaxes(1, 2), x.v.swapaxes(1, 2), seen, how)


def in_float32(x: Heads) -> Heads:
    return Heads(*(jnp.asarray(each, jnp.float32) for each in x))


REAL = np.arange(L) < np.array(LENGTH)[:, None]
CASES = [(0, 0.0, False), (3, 0.0, False), (0, 2.0, False), (3, 2.0, True)]


@pytest.mark.parametrize("case", few(CASES, [CASES[0], CASES[3]]))
@pytest.mark.parametrize("kind", ["masks", "kernel"])
@pytest.mark.parametrize("n", [1, 2])
def test_attention_is_the_loop(n: int, kind: str, case: tuple[int, float, bool]) -> None:
    """With windows, which do not hide slots, a soft cap, and sinks beside the slots."""
    x = drawn(n)
    found = np.asarray(attended(kind, in_float32(x), *case))
    np.testing.assert_allclose(found[REAL], looped(x, *case)[REAL], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [1, 2])
def test_slots_of_zeros_are_ones_in_the_denominator(n: int) -> None:
    x = drawn(n, 0.0)
    found = np.asarray(attended("masks", in_float32(x), 0, 0.0, False))
    for i, t, head in np.ndindex(N, L, H):
        if REAL[i, t]:
            e = np.exp(SCALE * x.k[i, : t + 1, head // 2] @ x.q[i, t, head])
            expected = e @ x.v[i, : t + 1, head // 2] / (n + e.sum())
            np.testing.assert_allclose(found[i, t, head], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("spread", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["masks", "kernel"])
def test_gradients_are_finite_differences_of_the_loop(kind: str, spread: float) -> None:
    """From zeros too: keys and values of slots leave them together, though one multiplies the other."""
    x, case = drawn(2, spread), (3, 2.0, True)
    weights = np.random.default_rng(9).normal(size=x.q.shape) * REAL[..., None, None]
    gradient = jax.grad(lambda heads: jnp.sum(weights * attended(kind, heads, *case)))(in_float32(x))
    for name in ("slot_k", "slot_v"):
        found, array = np.asarray(getattr(gradient, name)), getattr(x, name)
        for place in np.ndindex(*array.shape):
            step = np.zeros(array.shape)
            step[place] = 1e-5
            low, high = (np.sum(weights * looped(x._replace(**{name: array + s}), *case)) for s in (-step, step))
            assert found[place] == pytest.approx((high - low) / 2e-5, rel=1e-3, abs=2e-4)


def test_verified_drafts_see_slots() -> None:
    """Three tokens at once, after four whose keys and values are in a cache."""
    x, case = drawn(2), (3, 2.0, True)
    y, known = in_float32(x), 4
    how = Weighing(case[0], SCALE, case[1], y.sinks, Slots(y.slot_k, y.slot_v))
    later = jnp.arange(L)[:, None, None] >= known
    cache = pack(*(jnp.where(later, 0, each) for each in (y.k, y.v)), jnp.float32)
    new = (each[:, known:] for each in (y.q, y.k, y.v))
    found, _ = _attend(jnp.full(N, known), *new, cache, how)
    np.testing.assert_allclose(found, looped(x, *case)[:, known:], rtol=1e-4, atol=1e-5)


def with_slots(model: Any, n: int = 2) -> tuple[Any, Any]:
    """A tiny model with slots that are not 0."""
    policy, params = with_sink_slots(model.policy, model.params, n)
    random = np.random.default_rng(3)

    def noisy(path: Any, x: jax.Array) -> jax.Array:
        return x + random.normal(size=x.shape).astype(np.float32) if "sink_" in str(path[-1]) else x

    return policy, jax.tree_util.tree_map_with_path(noisy, params)


HOWS: dict[str, dict[str, Any]] = {"plain": {}, "few slots": {"slots": 3}, "speculative": {"speculative_tokens": 3}}


@pytest.mark.heavy
@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "qwen3_5", "gemma4_e2b"])
def test_sampler_and_trainer_agree(family: str, how: str, vectors: Any) -> None:
    """Windows and soft caps, sinks beside slots, states beside attention, and keys of another layer: in whole rows, and
    packed, where a group's prompt is there once."""
    policy, params = with_slots(vectors(family))
    prompts = [[5, 9, 200], [7, 1, 60, 61, 62, 3, 9], [80, 81] * 5]
    settings = {"group_size": 2, "max_new_tokens": 14, "stop_token_ids": [-1]} | HOWS[how]
    with quick_compiles():
        batch = sample(policy, params, prompts, jax.random.key(0), **settings)
        whole = policy_outputs(policy, params, batch)
        packed = policy_outputs(policy, params, batch, shared_prompts(batch, 2, 10, 14))
        without = policy_outputs(policy, jax.tree_util.tree_map_with_path(closed, params), batch)
    for found in (whole, packed):
        ratio = np.exp(np.asarray(found.logp) - np.asarray(batch.behaviour_logp))
        # The delta rule's unit norms make more of rounding, 5e-5 without slots.
        assert np.abs(ratio - 1).max() < (1e-3 if family == "qwen3_5" else 3e-5)
    assert np.abs(np.asarray(without.logp) - np.asarray(whole.logp)).max() > 1e-2, "they matter"


def closed(path: Any, x: jax.Array) -> jax.Array:
    return 0 * x if "sink_" in str(path[-1]) else x


def test_a_model_gets_slots(vectors: Any) -> None:
    """Two arrays more, counted by a plan; at first each slot of a head adds 1 to its softmax's denominator."""
    model = vectors("llama")
    policy, params = with_sink_slots(model.policy, model.params, 2)
    c = policy.config
    added = {name: x.shape for name, x in params["layers"].items() if name not in model.params["layers"]}
    shape = (c.num_layers, c.num_kv_heads, 2, c.head_dim)
    assert added == {"sink_keys": shape, "sink_values": shape}
    assert not any(np.any(params["layers"][name]) for name in added)
    assert "sink_keys" not in model.params["layers"], "those of the model are as they were"
    assert config_of(str(model.folder), 2).sink_slots == 2
    assert parameter_count(params) - parameter_count(model.params) == 2 * np.prod(shape)
    assert with_sink_slots(model.policy, model.params, 0) == (model.policy, model.params)


def test_what_cannot_have_slots_is_refused(vectors: Any, tmp_path: Path) -> None:
    model, latent = vectors("llama"), vectors("deepseek_v3")
    policy, params = with_sink_slots(model.policy, model.params, 1)
    with pytest.raises(InputError, match="the model has sink slots already, 1 a head"):
        with_sink_slots(policy, params, 2)
    with pytest.raises(InputError, match=r"keys and values are compressed \(MLA\)"):
        with_sink_slots(latent.policy, latent.params, 1)
    with pytest.raises(InputError, match="evolution perturbs projections alone"):
        check_members(policy.config)
    with pytest.raises(InputError, match="sink_slots is -1"):
        with_sink_slots(model.policy, model.params, -1)
    with pytest.raises(InputError, match="llama have no place for sink slots"):
        save_policy(tmp_path / "model", policy, params, model.tokenizer)
    assert not (tmp_path / "model").exists()
