"""Rows of one engine with adapters of their own: members of a population, and several LoRA adapters side by side."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import quick_compiles
from heavy import few
from other_process import on_devices, result_of

from jaxrl_llm.core.population import SEEDS, Population, noise_seed
from jaxrl_llm.models import lora
from jaxrl_llm.models.by_row import can_stack, check_members, stacked
from jaxrl_llm.models.layers import projections
from jaxrl_llm.models.layers.projections import ROWS, Members, linear, noise, with_members
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.models.parameters import adapted_by_default, adapted_weights, combine
from jaxrl_llm.models.stacks import map_kinds, unstack
from jaxrl_llm.sampling.batch import BatchRow, assemble
from jaxrl_llm.sampling.requests import Completion, Request
from jaxrl_llm.sampling.sampler import settings_of
from jaxrl_llm.sampling.stats import Stats
from jaxrl_llm.sampling.stream import stream
from jaxrl_llm.sampling.weights import take_weights
from jaxrl_llm.sampling.weights.adapters import of_members
from jaxrl_llm.utils.errors import InputError

PROMPTS = ((5, 9, 200), (7, 1, 60, 61, 62, 3, 9))
POPULATION = Population(sigma=0.05, rank=2)
SEED = 77


def materialised(policy: Any, params: Any, number: int, seed: int = SEED) -> Any:
    """The parameters of one member, W + sign (sigma / sqrt(r)) B A^T in the place of W, one dictionary a layer."""
    config, population = policy.config, policy.population
    names = {weight.name: weight for weight in adapted_weights(config).values() if adapted_by_default(weight)}
    layers = []
    for place, layer in enumerate(unstack(params, config)["layers"]):
        own, changed = Members(jnp.uint32(seed), jnp.int32(place), jnp.int32([number]), population), dict(layer)
        for name in set(layer) & set(names):
            w = layer[name]
            inputs = math.prod(w.shape[: names[name].inputs])
            (into,), (out,) = noise(own, name, inputs, w.size // inputs)
            sign = 1 if number % 2 == 0 else -1
            change = sign * population.sigma / population.rank**0.5 * (into @ out.T)
            changed[name] = w + change.reshape(w.shape)
        layers.append(changed)
    return {**params, "layers": tuple(layers)}


def drawn(
    policy: Any, weights: Any, requests: list[Request], temperature: float = 0.0, **more: Any
) -> list[Completion]:
    settings = settings_of(policy, jax.random.key(3), temperature, stop_token_ids=[])
    with quick_compiles():
        found = list(stream(policy, weights, requests, settings, **more))
    return sorted(found, key=lambda one: one.index)


def logp_of(policy: Any, params: Any, request: Request, done: Completion) -> np.ndarray:
    """The trainer's log-probabilities of a completion."""
    batch = jax.tree.map(jnp.asarray, assemble([BatchRow(request.prompt, done.tokens, False, 0, 0)], 1.0, False))
    with quick_compiles():
        found = jax.jit(policy_outputs, static_argnums=0)(policy, params, batch).logp
    return np.asarray(found)[np.asarray(batch.action_mask)]


@pytest.mark.parametrize(
    "name", few(("llama_tied", "gpt_oss", "qwen3_5", "gemma4_e2b", "lfm2"), ("llama_tied", "gpt_oss"))
)
def test_a_member_is_the_policy_with_its_weights(vectors: Callable[[str], Any], name: str) -> None:
    """In prefill and in decoding: of unlike layers, of experts (which stay), and of layers that carry states."""
    model = vectors(name)
    policy = dataclasses.replace(model.policy, population=POPULATION)
    requests = [Request(prompt, 8, i, adapter=n) for i, prompt in enumerate(PROMPTS) for n in (4, 5, 8)]
    found = drawn(policy, of_members(take_weights(policy, model.params), SEED), requests)
    plain = drawn(model.policy, take_weights(model.policy, model.params), requests[:1])
    for request, done in list(zip(requests, found, strict=True))[:3]:
        expected = logp_of(model.policy, materialised(policy, model.params, request.adapter), request, done)
        np.testing.assert_allclose(done.tokens.logp, expected, atol=1e-5 if name == "llama_tied" else 1e-4)
    assert abs(found[0].tokens.logp[0] - plain[0].tokens.logp[0]) > 1e-3
    assert abs(found[0].tokens.logp[0] - found[1].tokens.logp[0]) > 1e-3


@pytest.mark.parametrize("how", [{"slots": 2}, {"speculative_tokens": 3, "slots": 3}, {"cut": True}])
def test_however_they_are_decoded(vectors: Callable[[str], Any], how: dict[str, Any]) -> None:
    """In few rows that are refilled, by speculation, and continued from tokens they begin with: as all at once."""
    model = vectors("llama_tied")
    policy = dataclasses.replace(model.policy, population=POPULATION)
    weights = of_members(take_weights(policy, model.params), SEED)
    requests = [Request(prompt, 16, i, adapter=n) for i, prompt in enumerate(PROMPTS) for n in range(4)]
    expected, stats = drawn(policy, weights, requests), Stats()
    if "cut" in how:
        requests = [
            dataclasses.replace(one, begun=done.tokens.first(6 + i))
            for i, (one, done) in enumerate(zip(requests, expected, strict=True))
        ]
        how = {"slots": 3}
    found = drawn(policy, weights, requests, stats=stats, **how)
    assert [one.tokens.token.tolist() for one in found] == [one.tokens.token.tolist() for one in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.tokens.logp, other.tokens.logp, atol=1e-5)
    assert stats.prompts >= len(requests)  # no member has the keys and values of another
    assert len({tuple(one.tokens.token.tolist()) for one in found}) > 2


@pytest.mark.heavy
def test_members_of_rounded_weights(vectors: Callable[[str], Any]) -> None:
    """The weights are rounded, and what members add to their products is not: it is as large as without rounding."""
    model = vectors("llama_tied")
    policy = dataclasses.replace(model.policy, population=POPULATION)
    requests = [Request(PROMPTS[0], 1, adapter=n) for n in range(6)]
    apart = []
    for dtype in (None, "int8"):
        weights = of_members(take_weights(policy, model.params, weight_dtype=dtype), SEED)
        plain = take_weights(model.policy, model.params, weight_dtype=dtype)
        (base,) = drawn(model.policy, plain, requests[:1])
        found = drawn(policy, weights, requests)
        apart.append([one.tokens.entropy[0] - base.tokens.entropy[0] for one in found])
    assert np.std(apart[0]) > 5 * np.std(np.subtract(*apart))


def test_two_members_share_their_noise_and_no_others() -> None:
    members = Members(jnp.uint32(1), jnp.int32(0), jnp.arange(4), POPULATION)
    into, out = noise(members, "query", 5, 3)
    assert into.shape == (4, 5, 2)
    assert out.shape == (4, 3, 2)
    for x in (into, out):
        np.testing.assert_array_equal(x[0], x[1])
        np.testing.assert_array_equal(x[2], x[3])
        assert not np.allclose(x[0], x[2])
    np.testing.assert_allclose(members.factor, np.array([1, -1, 1, -1]) * 0.05 / np.sqrt(2), rtol=1e-6)
    others = (members.replace(seed=jnp.uint32(2)), members.replace(layer=jnp.int32(1)))
    for other, name in [*((one, "query") for one in others), (members, "key")]:
        assert not np.allclose(noise(other, name, 5, 3)[0], into)
    wide = members.replace(number=2 * jnp.arange(4000))
    values = np.concatenate([np.ravel(x) for x in noise(wide, "query", 5, 3)])
    assert abs(values.mean()) < 0.02
    assert abs(values.std() - 1) < 0.01


def test_noise_is_of_steps() -> None:
    twice, always = Population(reuse=2), Population(reuse=0)
    seeds = [int(twice.seed_at(step)) for step in range(6)]
    assert seeds[0] == seeds[1] != seeds[2] == seeds[3] != seeds[4]
    assert max(seeds) < SEEDS
    assert len({int(always.seed_at(step)) for step in range(4)}) == 1
    assert int(Population(seed=1, reuse=2).seed_at(0)) != seeds[0]
    assert int(jax.jit(lambda step: noise_seed(jax.random.key(0), twice, step))(3)) == seeds[3]


def test_the_worked_example_of_the_paper_s_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """y(+) and y(-) of W = 0."""
    given = jnp.array([[0.2, 0.4, -1.0]] * 2)[..., None], jnp.array([[1.0, -0.5]] * 2)[..., None]
    monkeypatch.setattr(projections, "noise", lambda members, name, inputs, outputs: given)
    members = Members(jnp.uint32(0), jnp.int32(0), jnp.arange(2), Population(sigma=0.1))
    x = jnp.broadcast_to(jnp.array([1.0, 2.0, 3.0]), (2, 1, 3))
    found = with_members(linear(x, jnp.zeros((3, 2))), x, {ROWS: members}, "query")
    np.testing.assert_allclose(found[:, 0], [[-0.2, 0.1], [0.2, -0.1]], rtol=1e-6)


@pytest.mark.parametrize("wrong", [{"sigma": 0.0}, {"rank": 0}, {"reuse": -1}, {"seed": -1}, {"rank": 1.5}])
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=f"{next(iter(wrong))} of Population is "):
        Population(**wrong)


def test_compressed_attention_is_refused(vectors: Callable[[str], Any]) -> None:
    config = vectors("deepseek_v3").policy.config
    with pytest.raises(InputError, match=r"attention to compressed keys and values \(MLA\)"):
        check_members(config)
    assert not can_stack(config, [])


def adapted(model: Any, seed: int, rank: int, *targets: str) -> Any:
    adapters = lora.init(jax.random.key(seed), model.policy.config, rank, targets)
    adapters = jax.tree.map(lambda x: x + 0.2 * jax.random.normal(jax.random.key(x.size + seed), x.shape), adapters)
    return combine(lora.scaled(model.params, rank, 8.0), adapters)


@pytest.mark.parametrize(
    ("name", "dtype"),
    few(
        (("llama_tied", jnp.float32), ("llama_tied", jnp.bfloat16), ("gemma4_e2b", jnp.float32)),
        [("llama_tied", jnp.float32)],
        unpack=True,
    ),
)
def test_several_adapters_in_one_batch_are_each_alone(vectors: Callable[[str], Any], name: str, dtype: Any) -> None:
    """Of unlike ranks and targets, beside the model without any; the base may have adapters of its own."""
    model = vectors(name)
    policy, exact = dataclasses.replace(model.policy, dtype=dtype), dtype == jnp.float32
    each = [model.params, adapted(model, 1, 4), adapted(model, 2, 3, "up", "down"), adapted(model, 3, 1)]
    assert can_stack(policy.config, each)
    for base, others in ((each[0], each[1:]), (each[1], each[:1] + each[2:]))[: 2 if exact else 1]:
        weights = take_weights(policy, stacked(base, others))
        requests = [Request(prompt, 8, i, adapter=n) for i, prompt in enumerate(PROMPTS) for n in range(4)]
        found = drawn(policy, weights, requests, 1.0)
        for number, params in enumerate([base, *others]):
            alone = [dataclasses.replace(one, adapter=0) for one in requests if one.adapter == number]
            expected = drawn(policy, take_weights(policy, params), alone, 1.0)
            own = [one for one, request in zip(found, requests, strict=True) if request.adapter == number]
            for one, other in zip(own, expected, strict=True):
                np.testing.assert_allclose(one.tokens.logp[0], other.tokens.logp[0], atol=1e-5 if exact else 0.1)
                if exact:
                    assert one.tokens.token.tolist() == other.tokens.token.tolist()
                    np.testing.assert_allclose(one.tokens.logp, other.tokens.logp, atol=1e-4)
        assert len({one.tokens.logp[0] for one in found[:4]}) == 4


def test_adapters_of_unlike_layers_stay_in_their_form(vectors: Callable[[str], Any]) -> None:
    """Layers stacked or one by one give the same."""
    model = vectors("llama_tied")
    each = [adapted(model, 1, 4), adapted(model, 2, 3, "up", "down")]
    whole = unstack(stacked(model.params, each), model.policy.config)
    apart = stacked(unstack(model.params, model.policy.config), [unstack(one, model.policy.config) for one in each])
    assert jax.tree.structure(whole) == jax.tree.structure(apart)
    jax.tree.map(np.testing.assert_array_equal, whole, apart)
    assert whole["layers"][0]["query_lora_in"].shape[-1] == 7


def test_adapters_of_experts_and_embeddings_are_not_stacked(vectors: Callable[[str], Any]) -> None:
    model = vectors("mixtral")
    attention = adapted(model, 1, 2)
    assert can_stack(model.policy.config, [model.params, attention])
    assert not can_stack(model.policy.config, [attention, adapted(model, 1, 2, "gate")])
    assert not can_stack(model.policy.config, [model.params, adapted(model, 1, 2, "unembed")])
    assert map_kinds(lambda layer: layer, attention["layers"]) == attention["layers"]


ON_FOUR_DEVICES = """
import json, sys
from dataclasses import replace
import jax, numpy as np
jax.config.update("jax_platforms", "cpu")
from jaxrl_llm import load_policy
from jaxrl_llm.core.population import Population
from jaxrl_llm.distributed import make_mesh, shard_params
from jaxrl_llm.sampling.requests import Request
from jaxrl_llm.sampling.sampler import settings_of
from jaxrl_llm.sampling.stream import stream
from jaxrl_llm.sampling.weights import take_weights
from jaxrl_llm.sampling.weights.adapters import of_members

policy, params, _ = load_policy(sys.argv[1])
policy = replace(policy, population=Population(sigma=0.05, rank=2))
requests = [Request(prompt, 12, i, adapter=n) for i, prompt in enumerate(((5, 9, 200), (7, 1, 60))) for n in range(4)]
settings = settings_of(policy, jax.random.key(0), 0.0, stop_token_ids=[])

def draw(params, mesh):
    found = list(stream(policy, of_members(take_weights(policy, params, mesh), 77), requests, settings))
    found = sorted(found, key=lambda one: one.index)
    return [one.tokens.token.tolist() for one in found], np.stack([one.tokens.logp for one in found])

expected, logp = draw(params, None)
out = []
for sizes in ((4, 1), (2, 2)):
    mesh = make_mesh(*sizes)
    tokens, found = draw(shard_params(params, policy.config, mesh), mesh)
    out.append([tokens == expected, float(np.abs(found - logp).max())])
print("RESULT" + json.dumps([out, len({tuple(row) for row in expected})]))
"""


def test_members_on_four_devices_draw_what_they_draw_on_one(vectors: Callable[[str], Any]) -> None:
    """Rows over four devices, and over two with heads over two."""
    out, different = result_of(
        ON_FOUR_DEVICES,
        str(vectors("llama_tied").folder),
        environment=on_devices(4, quick=True),
    )
    assert different > 2
    for same, apart in out:
        assert same
        assert apart < 1e-5
