"""Sampling with adapters: the trainer's arithmetic, on one device and on a mesh, and the tokens of merged weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import quick_compiles
from other_process import on_devices, result_of

from jaxrl_llm import sample
from jaxrl_llm.models import lora
from jaxrl_llm.models.outputs import policy_outputs
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.sampling import completion_ids
from jaxrl_llm.sampling.weights import take_weights
from jaxrl_llm.sampling.weights.adapters import with_adapters
from jaxrl_llm.sampling.weights.layouts import abstract_weights

pytestmark = pytest.mark.heavy

PROMPTS = [[5, 9, 200], [7, 1, 60, 61, 62, 3, 9]]
SETTINGS: dict[str, Any] = {"group_size": 2, "max_new_tokens": 12, "stop_token_ids": []}


def adapted(model: Any) -> Any:
    """Parameters with adapters that change the policy a good deal."""
    adapters = lora.init(jax.random.key(1), model.policy.config, 4)
    adapters = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), adapters)
    return combine(lora.scaled(model.params, 4, 8.0), adapters)


def test_sampled_log_probabilities_are_the_trainers_and_tokens_those_of_merged_weights(
    vectors: Callable[[str], Any],
) -> None:
    model = vectors("llama_tied")
    params = adapted(model)
    with quick_compiles():
        found, plain, of_merged = (
            sample(model.policy, p, PROMPTS, jax.random.key(0), **SETTINGS)
            for p in (params, model.params, lora.merge(params))
        )
        logp = jax.jit(policy_outputs, static_argnums=0)(model.policy, params, found).logp
    assert np.abs(np.where(found.action_mask, logp - found.behaviour_logp, 0)).max() < 2e-5
    assert completion_ids(found) == completion_ids(of_merged)
    np.testing.assert_allclose(found.behaviour_logp, of_merged.behaviour_logp, atol=1e-4)
    assert completion_ids(found) != completion_ids(plain)


def test_in_bfloat16_the_adapters_are_exact_where_merged_weights_are_not(vectors: Callable[[str], Any]) -> None:
    """Additions below half a unit in the last of 8 bits of a weight are lost in merging; apart they are not."""
    model = vectors("llama_tied")
    narrow = jax.tree.map(jnp.bfloat16, model.params)
    adapters = lora.init(jax.random.key(1), model.policy.config, 4)
    adapters = jax.tree.map(lambda x: x + 1e-3 * jax.random.normal(jax.random.key(x.size), x.shape), adapters)
    params = combine(lora.scaled(narrow, 4, 4.0), adapters)
    policy = dataclasses.replace(model.policy, dtype=jnp.float32)
    tokens = jnp.asarray([PROMPTS[1]])
    exact, apart, merged, without = (
        np.asarray(policy.logits(p, tokens))
        for p in (lora.merge(jax.tree.map(jnp.float32, params)), params, lora.merge(params), narrow)
    )
    added = np.abs(exact - without).mean()
    assert np.abs(apart - exact).mean() < 0.01 * added
    assert np.abs(merged - exact).mean() > 0.05 * added


def test_the_weights_of_the_loop_are_views_where_they_can_be(vectors: Callable[[str], Any]) -> None:
    model = vectors("llama_tied")
    params = adapted(model)
    weights = take_weights(model.policy, params)
    assert len(weights.loop["layers"]) == 2
    for name, w in params["layers"].items():
        for i, layer in enumerate(weights.loop["layers"]):
            np.testing.assert_array_equal(layer[name], w[i])
    start = params["layers"]["query_lora_in"].unsafe_buffer_pointer()
    assert weights.loop["layers"][0]["query_lora_in"].unsafe_buffer_pointer() == start
    shapes = abstract_weights(model.policy, jax.eval_shape(lambda: params))
    assert jax.tree.structure(shapes) == jax.tree.structure(weights.loop)


ON_FOUR_DEVICES = """
import json, sys
import jax, jax.numpy as jnp, numpy as np
jax.config.update("jax_platforms", "cpu")
from jax.sharding import NamedSharding, PartitionSpec
from jaxrl_llm import load_policy, sample
from jaxrl_llm.distributed import make_mesh, shard_params
from jaxrl_llm.models import lora
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.sampling import Stats, completion_ids
from jaxrl_llm.sampling.weights.layouts import abstract_weights

policy, base, _ = load_policy(sys.argv[1])
adapters = lora.init(jax.random.key(1), policy.config, 4)
adapters = jax.tree.map(lambda x: x + 0.05 * jax.random.normal(jax.random.key(x.size), x.shape), adapters)
params = combine(lora.scaled(base, 4, 8.0), adapters)
prompts = [[5, 9, 200], [7, 1, 60, 61, 62, 3, 9]]
settings = dict(group_size=2, max_new_tokens=12, stop_token_ids=[])

def draw(params, **more):
    stats = Stats()
    found = sample(policy, params, prompts, jax.random.key(0), stats=stats, **settings, **more)
    return completion_ids(found), np.asarray(found.behaviour_logp), stats.moved_bytes

expected, logp, _ = draw(params)
mesh = make_mesh(2, 2)
placed = shard_params(params, policy.config, mesh)
specs = {name: str(x.sharding.spec) for name, x in placed["layers"].items() if "lora" in name}
shapes = abstract_weights(policy, jax.eval_shape(lambda: params), mesh)
out = []
for name, given in {
    "sharded": placed,
    "whole": jax.device_put(params, NamedSharding(mesh, PartitionSpec())),
    "on one device": params,
}.items():
    found, found_logp, moved = draw(given, mesh=mesh)
    out.append([name, found == expected, float(np.abs(found_logp - logp).max()), moved])
print("RESULT" + json.dumps([out, specs, str(shapes["layers"][0]["down_lora_in"].sharding.spec)]))
"""


def test_on_a_mesh_tokens_are_those_of_one_device(vectors: Callable[[str], Any]) -> None:
    """Heads and inner units split over 2 devices, each adapter with its weight."""
    out, specs, of_loop = result_of(
        ON_FOUR_DEVICES,
        str(vectors("llama_tied").folder),
        environment=on_devices(4, quick=True),
    )
    for name, same, error, moved in out:
        assert same, name
        assert error < 1e-4, name
        assert (moved == 0) == (name != "on one device"), name
    assert "tensor" in specs["query_lora_out"]
    assert "tensor" not in specs["query_lora_in"]
    assert "tensor" in of_loop


@pytest.mark.parametrize("rounding", [None, "int8"])
@pytest.mark.parametrize("targets", [("query", "down"), ("query", "embed", "unembed")])
def test_models_with_adapters_share_the_arrays_of_the_decode_loop(
    targets: tuple[str, ...], rounding: str | None, vectors: Any
) -> None:
    """In bfloat16, for which the loop has a copy of the model's weights."""
    model = vectors("llama")
    policy = dataclasses.replace(model.policy, dtype=jnp.bfloat16, rounding=rounding)
    adapters = jax.tree.map(lambda x: x + 0.1, lora.init(jax.random.key(0), policy.config, 2, targets))
    params = lora.scaled(combine(model.params, adapters), 2, 4.0)
    base = take_weights(policy, model.params)
    found, alone = with_adapters(policy, base, params), take_weights(policy, params)
    jax.tree.map(np.testing.assert_array_equal, found._asdict(), alone._asdict())
    own = jax.tree.leaves({name: x for name, x in base.loop.items() if name not in ("head", "unembed")})
    shared = {id(x) for x in jax.tree.leaves(found.loop)} & {id(x) for x in own}
    assert len(shared) == len(own)
