"""Every setting of a config.json that changes what a model computes is read, and written back."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_llm.models import ModelConfig, from_hf, init_params, to_hf
from jaxrl_llm.models.config.rope import Rope
from jaxrl_llm.models.families import FAMILIES
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.utils.errors import InputError

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONG = {"type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0]}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def small(**changes: Any) -> dict[str, Any]:
    """A config.json in the older spelling, small enough to run."""
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 11,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
    }
    return raw | changes


def logits(config: ModelConfig) -> np.ndarray:
    """Of fixed parameters and tokens; large random weights, so that every setting shows."""
    params = init_params(jax.random.key(0), config, scale=0.7)
    tokens = np.arange(12, dtype=np.int32)[None] % config.vocab_size
    return np.asarray(Policy(config).logits(params, tokens))


def test_plain_llama() -> None:
    assert from_hf(small()) == ModelConfig(
        family="llama",
        vocab_size=11,
        hidden_size=8,
        intermediate_size=12,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        norm_epsilon=1e-5,
        tie_embeddings=False,
        ropes=(Rope(theta=10_000.0),),
        rope_of_layer=(0,),
        window_of_layer=(0,),
        query_scale=0.5,
        max_positions=64,
        # Llama's router setting is never looked at.
        normalise_router=False,
    )


@pytest.mark.parametrize(
    "change, expected",
    [
        ({"rope_theta": 500_000.0}, {"ropes": (Rope(theta=500_000.0),)}),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, {"ropes": (Rope(kind="linear", factor=2.0),)}),
        ({"rope_scaling": LLAMA3}, {"ropes": (Rope(kind="llama3", factor=8.0, original_length=32),)}),
        ({"rope_scaling": YARN}, {"ropes": (Rope(kind="yarn", factor=4.0, original_length=32),)}),
        (
            {"rope_scaling": YARN | {"attention_factor": 1.5}},
            {"ropes": (Rope(kind="yarn", factor=4.0, original_length=32, attention_factor=1.5),)},
        ),
        (
            {"rope_scaling": YARN | {"beta_fast": 4.0, "beta_slow": 2.0, "truncate": False}},
            {
                "ropes": (
                    Rope(kind="yarn", factor=4.0, original_length=32, beta_fast=4.0, beta_slow=2.0, truncate=False),
                )
            },
        ),
        ({"rms_norm_eps": 0.3}, {"norm_epsilon": 0.3}),
        ({"hidden_act": "gelu"}, {"activation": "gelu"}),
        ({"num_key_value_heads": 2}, {"num_kv_heads": 2}),
        ({"head_dim": 6}, {"head_dim": 6, "query_scale": 6**-0.5}),
        ({"tie_word_embeddings": True}, {"tie_embeddings": True}),
        ({"num_hidden_layers": 2}, {"num_layers": 2, "rope_of_layer": (0, 0), "window_of_layer": (0, 0)}),
    ],
)
def test_one_change_at_a_time(change: dict[str, Any], expected: dict[str, Any]) -> None:
    before, after = from_hf(small()), from_hf(small(**change))
    assert after == dataclasses.replace(before, **expected)
    assert np.abs(logits(after) - logits(before)).max() > 1e-3
    assert from_hf(to_hf(after)) == after


@pytest.mark.parametrize(
    "change, field",
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"eos_token_id": 3}, "eos_token_ids"),
        ({"bos_token_id": 1}, "bos_token_id"),
        ({"max_position_embeddings": 128}, "max_positions"),
    ],
)
def test_changes_that_fresh_weights_do_not_show(change: dict[str, Any], field: str) -> None:
    after = from_hf(small(**change))
    assert getattr(after, field) != getattr(from_hf(small()), field)
    assert from_hf(to_hf(after)) == after


def test_biases_count() -> None:
    """Each bias of Llama (attention in and out, MLP) moves the logits."""
    config = from_hf(small(attention_bias=True, mlp_bias=True))
    params = init_params(jax.random.key(0), config, scale=0.7)
    names = {name for name in params["layers"] if name.endswith("bias")}
    assert names == {f"{n}_bias" for n in ("query", "key", "value", "out", "gate", "up", "down")}
    tokens = np.arange(12, dtype=np.int32)[None] % 11
    plain = np.asarray(Policy(config).logits(params, tokens))
    for name in names:
        ramp = np.linspace(-1, 1, params["layers"][name].size, dtype=np.float32)
        biased = {**params["layers"], name: ramp.reshape(params["layers"][name].shape)}
        moved = np.asarray(Policy(config).logits({**params, "layers": biased}, tokens))
        assert np.abs(moved - plain).max() > 1e-3, name


@pytest.mark.parametrize("scaling", [None, LLAMA3, YARN, {"rope_type": "linear", "factor": 4.0}])
def test_both_spellings_of_the_rotary_settings(scaling: dict[str, Any] | None) -> None:
    older = small(rope_theta=77.0, rope_scaling=scaling)
    newer = {k: v for k, v in small().items() if k != "rope_theta"}
    newer["rope_parameters"] = {"rope_theta": 77.0, "rope_type": "default"} | (scaling or {})
    if scaling is YARN:
        newer["rope_parameters"] = {"rope_theta": 77.0, "rope_type": "yarn"} | {
            k: v for k, v in YARN.items() if k != "type"
        }
    assert from_hf(older) == from_hf(newer)
    assert from_hf(older).ropes[0].theta == 77.0


@pytest.mark.parametrize("original, used", [(32, "long_factor"), (64, "short_factor")])
def test_both_lists_of_longrope_come_back(original: int, used: str) -> None:
    config = from_hf(small(rope_scaling=LONG, original_max_position_embeddings=original))
    assert list(config.ropes[0].factors) == LONG[used]
    written = to_hf(config)["rope_parameters"]
    assert {name: written[name] for name in ("short_factor", "long_factor")} == {
        name: LONG[name] for name in ("short_factor", "long_factor")
    }
    assert from_hf(to_hf(config)) == config


def test_gemma3_spellings() -> None:
    common = small(
        model_type="gemma3_text",
        num_hidden_layers=6,
        sliding_window=4,
        hidden_activation="gelu_pytorch_tanh",
        query_pre_attn_scalar=16,
        head_dim=4,
    )
    del common["rope_theta"], common["tie_word_embeddings"]
    older = common | {
        "rope_theta": 1e6,
        "rope_local_base_freq": 20_000.0,
        "sliding_window_pattern": 3,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }
    newer = common | {
        "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 20_000.0},
        },
    }
    config = from_hf(older)
    assert config == from_hf(newer)
    assert config.window_of_layer == (4, 4, 0, 4, 4, 0)
    assert [config.ropes[i].theta for i in config.rope_of_layer] == [2e4, 2e4, 1e6, 2e4, 2e4, 1e6]
    assert config.tie_embeddings
    assert config.query_scale == 0.25
    assert from_hf(to_hf(config)) == config


@pytest.mark.parametrize(
    "change, windows",
    [
        ({"model_type": "llama", "sliding_window": 4}, (0, 0, 0, 0)),
        ({"model_type": "mixtral", "sliding_window": 4, "num_local_experts": 2}, (4, 4, 4, 4)),
        ({"model_type": "mixtral", "sliding_window": None, "num_local_experts": 2}, (0, 0, 0, 0)),
        ({"model_type": "gemma2", "sliding_window": 4}, (4, 0, 4, 0)),
        ({"model_type": "gemma2"}, (4096, 0, 4096, 0)),
        ({"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": False}, (0, 0, 0, 0)),
        (
            {"model_type": "qwen2", "sliding_window": 4, "use_sliding_window": True, "max_window_layers": 3},
            (0, 0, 0, 4),
        ),
        (
            {
                "model_type": "qwen3_moe",
                "sliding_window": 4,
                "use_sliding_window": True,
                "moe_intermediate_size": 6,
                "num_experts": 8,
            },
            (4, 4, 4, 4),
        ),
        (
            {
                "model_type": "qwen3",
                "sliding_window": 4,
                "use_sliding_window": True,
                "layer_types": ["full_attention", "sliding_attention"] * 2,
            },
            (0, 4, 0, 4),
        ),
    ],
)
def test_sliding_windows(change: dict[str, Any], windows: tuple[int, ...]) -> None:
    config = from_hf(small(num_hidden_layers=4, **change))
    assert config.window_of_layer == windows
    assert from_hf(to_hf(config)) == config


def test_what_a_file_leaves_out() -> None:
    bare = small()
    for name in ("rms_norm_eps", "rope_theta", "tie_word_embeddings", "num_key_value_heads", "hidden_act"):
        del bare[name]
    llama = from_hf(bare)
    assert (llama.norm_epsilon, llama.ropes[0].theta, llama.tie_embeddings) == (1e-6, 1e4, False)
    assert (llama.num_kv_heads, llama.activation) == (2, "silu")
    bare["num_key_value_heads"] = 2
    gemma = from_hf(bare | {"model_type": "gemma2"})
    assert (gemma.attention_softcap, gemma.logit_softcap, gemma.head_dim) == (50.0, 30.0, 256)
    assert (gemma.tie_embeddings, gemma.activation, gemma.query_scale) == (True, "gelu_pytorch_tanh", 256**-0.5)
    off = bare | {"model_type": "gemma2", "attn_logit_softcapping": None, "final_logit_softcapping": None}
    assert (from_hf(off).attention_softcap, from_hf(off).logit_softcap) == (0.0, 0.0)
    mixtral = from_hf(bare | {"model_type": "mixtral", "num_local_experts": 2, "num_key_value_heads": 2})
    assert (mixtral.norm_epsilon, mixtral.ropes[0].theta, mixtral.normalise_router) == (1e-5, 1e6, True)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "the model type 'mamba' is not supported"),
        (
            {"model_type": None, "architectures": ["MambaForCausalLM"]},
            "architecture 'MambaForCausalLM' is not supported",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.25, "rope_parameters": {"rope_theta": 5e5}}, "partial_rotary_factor"),
        ({"rope_scaling": {"type": "longrope", "short_factor": [1.0, 1.5]}}, "lacks 'long_factor'"),
        ({"rope_scaling": LONG | {"long_factor": [2.0]}}, "1 rotary factors for heads of 4, which need 2"),
        ({"rope_scaling": LONG | {"short_factor": 1.0}}, "rope_scaling.short_factor"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised .'gptq'. are not read"),
        ({"hidden_act": "relu"}, "activation 'relu' is not supported"),
        ({"model_type": "gemma3_text", "use_bidirectional_attention": True}, "causal"),
    ],
)
def test_what_is_not_supported(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        from_hf(small(**change))
    assert "\n" not in str(caught.value)


def test_layers_of_qwen_mixtures_that_are_dense() -> None:
    """Those that are listed, and all but every second."""
    settings = {"model_type": "qwen3_moe", "moe_intermediate_size": 4, "num_experts": 4, "num_experts_per_tok": 2}
    config = from_hf(small(**settings, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert [config.of_layer(layer).num_experts for layer in range(6)] == [0, 4, 0, 0, 0, 4]
    assert [config.of_layer(layer).intermediate_size for layer in (0, 1)] == [small()["intermediate_size"], 4]
    assert from_hf(to_hf(config)) == config


def test_unsupported_architectures_are_told_which_are() -> None:
    with pytest.raises(InputError) as caught:
        from_hf({"model_type": "bert", "architectures": ["BertModel"]})
    assert all(family in str(caught.value) for family in FAMILIES)
    with pytest.raises(InputError, match="not supported"):
        from_hf({})


def test_missing_sizes() -> None:
    raw = small()
    del raw["hidden_size"]
    with pytest.raises(InputError, match="lacks 'hidden_size'"):
        from_hf(raw)


def test_a_table_of_frequencies_has_no_file_format() -> None:
    config = dataclasses.replace(from_hf(small()), ropes=(Rope(kind="factors", factors=(1.0, 2.0)),))
    with pytest.raises(InputError, match="cannot express"):
        to_hf(config)


def test_round_trip(family: str, vectors: Any) -> None:
    config = vectors(family).policy.config
    assert from_hf(to_hf(config)) == config
    assert from_hf(json.loads(json.dumps(to_hf(config)))) == config
    hash(config)


def test_transformers_reads_what_we_write(family: str, vectors: Any, tmp_path: Any) -> None:
    """Its configuration of our file equals its configuration of the original file, in what matters to the model."""
    from transformers import AutoConfig

    model = vectors(family)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(model.policy.config)))
    ours, original = AutoConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(model.folder)
    assert type(ours) is type(original)
    names = [
        *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "max_position_embeddings"),
        *("hidden_act", "hidden_activation", "eos_token_id", "bos_token_id", "attention_bias", "mlp_bias"),
        *("sliding_window", "layer_types", "query_pre_attn_scalar", "attn_logit_softcapping"),
        *("final_logit_softcapping", "num_experts_per_tok", "num_local_experts", "num_experts"),
        *("moe_intermediate_size", "norm_topk_prob", "use_sliding_window", "decoder_sparse_step"),
    ]
    ignored = set()
    if family == "qwen3_moe":
        ignored = {"intermediate_size"}  # of dense layers, of which there are none
    if family == "qwen2":
        ignored = {"head_dim"}  # derived when it is not written
    if family.startswith("gemma"):
        ignored = {"hidden_act"}  # the older name, for older readers
    for name in set(names) - ignored:
        assert getattr(ours, name, None) == getattr(original, name, None), name

    def rotary(config: Any) -> dict[str, Any]:
        """Without the older name of "rope_type", which is for older readers."""
        found = {k: v for k, v in config.rope_parameters.items() if v is not None}
        each = {k: {n: x for n, x in v.items() if n != "type"} if isinstance(v, dict) else v for k, v in found.items()}
        return {k: v for k, v in each.items() if k != "type"}

    assert rotary(ours) == rotary(original)


@pytest.mark.parametrize("family", ["glm4", "glm4_moe", "qwen3_5", "gpt_oss", "olmo3", "gemma2", "gemma3"])
def test_no_default_of_transformers_takes_the_place_of_a_setting(family: str, vectors: Any, tmp_path: Any) -> None:
    """Heads that are rotated whole, layers of which none slides, no token of padding: its defaults are others."""
    from transformers import AutoConfig

    raw = json.loads((vectors(family).folder / "config.json").read_text())
    rotated = "partial_rotary_factor" in raw["rope_parameters"]
    if rotated:
        raw["rope_parameters"]["partial_rotary_factor"] = 1.0
    else:
        raw["layer_types"] = ["full_attention"] * raw["num_hidden_layers"]
    config = from_hf(raw)
    assert from_hf(to_hf(config)) == config
    (tmp_path / "config.json").write_text(json.dumps(to_hf(config)))
    read = AutoConfig.from_pretrained(tmp_path)
    assert read.pad_token_id is None
    if rotated:
        assert read.rope_parameters["partial_rotary_factor"] == 1.0
    else:
        assert read.sliding_window > 0
        assert set(read.layer_types) == {"full_attention"}
