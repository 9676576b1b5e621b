"""The table of weights: every part of the library that names weights agrees with it, and it with transformers."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, PartitionSpec

from jaxrl_llm.distributed import fully_sharded, parameter_specs
from jaxrl_llm.learner.optimizer import NOT_DECAYED, merge_heads
from jaxrl_llm.models import ModelConfig, Policy, init_params, lora
from jaxrl_llm.models.checks import check_params
from jaxrl_llm.models.critic import Critic, init_critic
from jaxrl_llm.models.io.huggingface import to_tensors
from jaxrl_llm.models.io.layout import stored_tensors
from jaxrl_llm.models.parameters import AXES, adapted_weights, adapter_axes, head_shapes, parameter_shapes, weights
from jaxrl_llm.models.parameters.table import HEAD, HEAD_MLP, TABLE
from jaxrl_llm.models.parameters.weight import IDENTITY, NORMAL, PLAIN, ZEROS

CONFIG = ModelConfig(
    family="llama", vocab_size=48, hidden_size=16, intermediate_size=24, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=8, norm_epsilon=1e-5, tie_embeddings=False, rope_of_layer=(0, 0), window_of_layer=(0, 0), query_scale=0.3,
    attention_bias=True, output_bias=True, mlp_bias=True, qk_norm=True,
)  # fmt: skip
VARIANTS = {
    "all biases": CONFIG,
    "tied": dataclasses.replace(CONFIG, tie_embeddings=True),
    "gemma": dataclasses.replace(CONFIG, family="gemma2", post_norms=True, norm_offset=1.0),
    "mixtral": dataclasses.replace(CONFIG, family="mixtral", num_experts=3, experts_per_token=2, mlp_bias=False),
    "qwen3_moe": dataclasses.replace(CONFIG, family="qwen3_moe", num_experts=3, experts_per_token=2, mlp_bias=False),
}
LETTERS = {
    "layers": "n", "experts": "E", "hidden": "D", "heads": "H", "kv_heads": "K", "head_size": "h", "inner": "F",
    "vocabulary": "V", "rank": "r", "units": "U", "values": "W", "value_size": "g", "choices": "E", "shared": "S",
    "one": "1", "inputs": "i", "all_inputs": "I", "query_rank": "q", "kv_rank": "R", "latent": "c", "plain": "p",
    "query_heads": "G", "query_size": "x", "state_heads": "Z", "state_size": "y", "taps": "t", "channels": "C",
    "labels": "L", "slots": "s",
}  # fmt: skip
EXPECTED = {  # by hand: axes and initialiser of every row that some model has
    "embed": "VD normal", "final_norm": "D identity", "unembed": "VD normal", "attention_norm": "nD identity",
    "query": "nDHh normal", "key": "nDKh normal", "value": "nDKh normal", "out": "nHgD normal",
    "mlp_norm": "nD identity", "query_bias": "nHh zeros", "key_bias": "nKh zeros", "value_bias": "nKh zeros",
    "out_bias": "nD zeros", "query_norm": "nh identity", "key_norm": "nh identity",
    "attention_post_norm": "nD identity", "mlp_post_norm": "nD identity", "gate": "nDF normal", "up": "nDF normal",
    "down": "nFD normal", "gate_bias": "nF zeros", "up_bias": "nF zeros", "down_bias": "nD zeros",
    "router": "nDE normal", "router_bias": "nE zeros", "router_correction": "nE zeros", "router_norm": "nD identity",
    "expert_scale": "nE identity", "shared_gate": "nDS normal", "shared_up": "nDS normal", "shared_down": "nSD normal",
    "shared_switch": "nD1 normal", "experts_norm": "nD identity", "experts_post_norm": "nD identity",
    "shared_post_norm": "nD identity", "query_joint_norm": "nHh identity", "key_joint_norm": "nKh identity",
    "sinks": "nH zeros", "sink_keys": "nKsh zeros", "sink_values": "nKsh zeros",
    "layer_scale": "n identity", "query_in": "nDq normal", "query_in_norm": "nq identity",
    "query_out": "nqHh normal", "latent": "nDc normal", "latent_norm": "nR identity", "key_out": "nRHp normal",
    "value_out": "nRHg normal", "embed_inputs": "VI normal", "project_inputs": "DI normal", "inputs_norm": "i identity",
    "input_gate": "nDi normal", "input_out": "niD normal", "input_post_norm": "nD identity",
    "query_gate": "nDHh normal", "delta_query": "nDGx normal", "delta_key": "nDGx normal", "delta_value": "nDZy normal",
    "delta_gate": "nDZy normal", "query_taps": "ntGx normal", "key_taps": "ntGx normal", "value_taps": "ntZy normal",
    "delta_rate": "nDZ normal", "delta_decay": "nDZ normal", "log_rate": "nZ zeros", "decay_bias": "nZ zeros",
    "delta_norm": "ny plain", "delta_out": "nZyD normal", "conv_in": "nDC normal", "conv_gate": "nDC normal",
    "conv_value": "nDC normal", "conv_taps": "ntC normal", "conv_out": "nCD normal",
    "score": "DL normal",
}  # fmt: skip


def letters(axes: tuple[str, ...]) -> str:
    return "".join(LETTERS[axis] for axis in axes)


def test_rows_by_hand() -> None:
    found = {weight.name: f"{letters(weight.axes)} {weight.initialiser}" for weight in reversed(TABLE)}
    assert found == EXPECTED
    experts = {weight.name: letters(weight.axes) for weight in weights(VARIANTS["mixtral"]).values()}
    assert (experts["gate"], experts["up"], experts["down"]) == ("nEDF", "nEDF", "nEFD")
    own = adapted_weights(CONFIG).values()
    assert {name: letters(axes) for weight in own for name, axes in adapter_axes(weight).items()} == {
        "embed_lora_in": "Vr", "embed_lora_out": "rD", "unembed_lora_in": "Dr", "unembed_lora_out": "rV",
        "query_lora_in": "nDr", "query_lora_out": "nrHh", "key_lora_in": "nDr", "key_lora_out": "nrKh",
        "value_lora_in": "nDr", "value_lora_out": "nrKh", "out_lora_in": "nHgr", "out_lora_out": "nrD",
        "gate_lora_in": "nDr", "gate_lora_out": "nrF", "up_lora_in": "nDr", "up_lora_out": "nrF",
        "down_lora_in": "nFr", "down_lora_out": "nrD",
    }  # fmt: skip
    adapted = adapted_weights(VARIANTS["mixtral"])
    assert {name: letters(axes) for name, axes in adapter_axes(adapted["layers", "down"]).items()} == {
        "down_lora_in": "nEFr", "down_lora_out": "nErD",
    }  # fmt: skip
    assert ("layers", "router") not in adapted
    assert {path[0] for path in adapted_weights(VARIANTS["tied"])} == {"layers"}


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_initialisation_checks_and_names_agree(config: ModelConfig) -> None:
    params, shapes = init_params(jax.random.key(0), config), parameter_shapes(config)
    flat = {tuple(key.key for key in path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
    assert {path: x.shape for path, x in flat.items()} == shapes
    check_params(Policy(config), params)
    for path, weight in weights(config).items():
        low, high = float(flat[path].min()), float(flat[path].max())
        expected = {IDENTITY: (1 - config.norm_offset,) * 2, ZEROS: (0, 0)}.get(weight.initialiser)
        assert (low, high) == expected if expected else low < 0 < high
    tensors = to_tensors(params, config)
    names = [stored.name for stored in stored_tensors(config)]
    assert sorted(tensors) == sorted(names)  # each tensor of one row alone
    assert sum(x.size for x in tensors.values()) == sum(map(math.prod, shapes.values()))
    stored = [weight.gguf for weight in weights(config).values()]
    assert len(set(stored)) == len(stored)


def test_every_tensor_of_transformers_is_in_one_row(vectors: Any, family: str) -> None:
    """The models were saved by transformers, and `load_policy` refuses tensors that no row reads."""
    model = vectors(family)
    found = {path: x.shape for path, x in jax.tree_util.tree_leaves_with_path(model.params)}
    assert {tuple(key.key for key in path): shape for path, shape in found.items()} == parameter_shapes(
        model.policy.config
    )


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_a_weight_is_split_along_heads_inner_units_and_vocabulary(config: ModelConfig) -> None:
    """Split over "tensor" is each weight that has such an axis, along it, and no other."""
    shapes, specs = parameter_shapes(config), parameter_specs(config, AbstractMesh((1, 2), ("data", "tensor")))
    for path, axes in ((path, weight.axes) for path, weight in weights(config).items()):
        spec = specs["layers"][path[1]] if path[0] == "layers" else specs[path[0]]
        split = [axis for axis in axes if axis in ("heads", "kv_heads", "inner", "vocabulary")]
        assert [axis for axis, name in zip(axes, spec, strict=False) if name == "tensor"] == split
        assert len(shapes[path]) == len(axes)


def test_adapters_and_a_critics_head_follow_the_table() -> None:
    policy, key = Policy(CONFIG, critic=Critic("tower", heads=3, hidden=12)), jax.random.key(0)
    params = init_critic(key, policy, init_params(key, CONFIG), policy.critic)
    assert {name: x.shape for name, x in params["critic"]["head"].items()} == head_shapes(CONFIG, 12, 3)
    assert set(params["critic"]["tower"]) == {"embed", "layers", "final_norm"}
    assert [letters(weight.axes) for weight in (*HEAD_MLP, *HEAD)] == ["D", "D", "DU", "U", "UW", "W"]
    adapters = lora.init(key, CONFIG, 5)["layers"]
    shapes = {name: tuple(x.shape) for name, x in adapters.items()}
    assert shapes["out_lora_in"] == (2, 4, 8, 5)
    assert shapes["key_lora_out"] == (2, 5, 2, 8)
    assert set(shapes) < set(AXES)
    # The head's MLP, one of whose matrices has the name of a decoder's, is whole on the axis "tensor".
    places = fully_sharded(params, CONFIG, AbstractMesh((1, 8), ("data", "tensor")))
    assert all("tensor" not in place.spec for place in jax.tree.leaves(places["critic"]["head"]))
    assert places["critic"]["tower"]["layers"]["up"].spec == PartitionSpec(None, None, "tensor")


def test_what_weight_decay_and_factored_moments_read() -> None:
    assert {"embed", "unembed", "query_norm", "out_bias", "bias"} < NOT_DECAYED
    assert not NOT_DECAYED & {"query", "down", "router", "weight", "query_lora_in"}
    for name in ("query", "out", "gate", "query_bias", "embed", "anything"):
        shape = {"query": (2, 16, 4, 8), "out": (2, 4, 8, 16)}.get(name, (2, 16, 3))
        merged = merge_heads(name, shape)
        assert merged == {"query": (2, 16, 32), "out": (2, 32, 16)}.get(name, shape)
        assert np.prod(merged) == np.prod(shape)
    assert {weight.initialiser for weight in (*TABLE, *HEAD_MLP, *HEAD)} == {NORMAL, IDENTITY, PLAIN, ZEROS}
