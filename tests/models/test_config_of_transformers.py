"""A config.json is read as transformers reads it: both spellings, what is left out, and settings that differ."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import CONFIG_MAPPING, __version__

from jaxrl_llm.models import from_hf, to_hf
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.config.rope import Rope

pytestmark = pytest.mark.skipif(
    tuple(map(int, __version__.split(".")[:2])) < (5, 20), reason="earlier versions read rope_parameters otherwise"
)
# Those whose configurations transformers spells alike.
FAMILIES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mixtral", "qwen3_moe")
KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, mscale": {"factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.7},
    "yarn, half of it": {"factor": 4.0, "mscale": 0.7, "beta_fast": 16.0, "truncate": False},
}


@st.composite
def rotations(draw: Any, whole: bool = False) -> dict[str, Any]:
    """whole: with what transformers wants to be there in settings by kind of layer."""
    name = draw(st.sampled_from(sorted(KINDS)))
    found = {"rope_type" if whole else draw(st.sampled_from(["rope_type", "type"])): name.partition(",")[0]}
    found |= {**({"original_max_position_embeddings": 24} if whole and "yarn" in name else {}), **KINDS[name]}
    if draw(st.booleans()):
        found["rope_theta"] = draw(st.sampled_from([10_000.0, 500_000.0]))
    return found


@st.composite
def files(draw: Any) -> dict[str, Any]:
    """A config.json, with each setting that has a default left out at times."""
    family = draw(st.sampled_from(FAMILIES))
    layers = draw(st.sampled_from([2, 30]))
    raw: dict[str, Any] = {
        "model_type": family, "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96,
        "num_hidden_layers": layers, "num_attention_heads": 32,
    }  # fmt: skip
    optional: dict[str, Any] = {
        "num_key_value_heads": [8], "head_dim": [16], "max_position_embeddings": [64], "rms_norm_eps": [1e-5],
        "rope_theta": [20_000.0], "sliding_window": [None, 8], "use_sliding_window": [True, False],
        "max_window_layers": [1, 29], "tie_word_embeddings": [True, False], "attention_bias": [True, False],
        "hidden_act": ["gelu", "silu"], "hidden_activation": ["gelu"], "sliding_window_pattern": [2],
        "rope_local_base_freq": [5_000.0], "query_pre_attn_scalar": [64], "attn_logit_softcapping": [None, 20.0],
        "final_logit_softcapping": [None, 20.0], "num_experts_per_tok": [4], "norm_topk_prob": [True, False],
    }  # fmt: skip
    for name, values in optional.items():
        if draw(st.booleans()):
            raw[name] = draw(st.sampled_from(values))
    if family in ("mixtral", "qwen3_moe"):
        raw["num_experts" if family == "qwen3_moe" else "num_local_experts"] = 8
        raw["moe_intermediate_size"] = 32
    gemma3 = family == "gemma3_text"
    if draw(st.booleans()):
        raw["rope_scaling"] = draw(st.one_of(st.none(), rotations(gemma3)))
    if draw(st.booleans()):
        one = draw(rotations(gemma3))
        raw["rope_parameters"] = {"full_attention": one, "sliding_attention": draw(rotations(True))} if gemma3 else one
    return raw


def rope_of(found: dict[str, Any]) -> Rope:
    """What transformers' settings of a rotation mean."""
    kind = found["rope_type"]
    out: dict[str, Any] = {"theta": float(found["rope_theta"]), "kind": kind}
    if kind != "default":
        out["factor"] = float(found["factor"])
    if kind in ("llama3", "yarn"):
        out["original_length"] = found["original_max_position_embeddings"]
    if kind == "yarn":
        scales = [found.get(name) for name in ("mscale", "mscale_all_dim")]
        of = [0.1 * (scale or 0) * math.log(found["factor"]) + 1 for scale in scales]
        attention = found.get("attention_factor") or (of[0] / of[1] if all(scales) else 0.0)
        out |= {"attention_factor": attention, "truncate": found.get("truncate", True)}
        out |= {"beta_fast": float(found.get("beta_fast") or 32)}
    return Rope(**out)


@settings(deadline=None, max_examples=300)
@given(raw=files())
def test_settings_are_read_as_transformers_reads_them(raw: dict[str, Any]) -> None:
    try:
        theirs: Any = CONFIG_MAPPING[raw["model_type"]](**copy.deepcopy(raw))
    except Exception:  # what they refuse may be refused here
        return
    types = getattr(theirs, "layer_types", None)
    if raw["model_type"] in ("mixtral", "qwen3_moe"):
        types = ["sliding_attention" if theirs.sliding_window else "full_attention"] * theirs.num_hidden_layers
    elif raw["model_type"] == "llama":
        types = ["full_attention"] * theirs.num_hidden_layers
    window = getattr(theirs, "sliding_window", None)
    if types and "sliding_attention" in types and not window:
        return  # their masks raise
    ours = from_hf(raw)
    assert ours.window_of_layer == tuple(window if one == "sliding_attention" else 0 for one in types)
    found = theirs.rope_parameters
    if raw["model_type"] == "gemma3_text":
        expected = tuple(rope_of(found[name]) for name in ("full_attention", "sliding_attention"))
        assert [ours.ropes[i] for i in ours.rope_of_layer] == [expected[one == "sliding_attention"] for one in types]
    else:
        expected = (rope_of(found),)
    assert ours.ropes == expected
    gemma = raw["model_type"].startswith("gemma")
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (ours.head_dim, ours.num_kv_heads) == (head_dim, theirs.num_key_value_heads)
    assert ours.activation == (theirs.hidden_activation if gemma else theirs.hidden_act)
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.norm_epsilon == theirs.rms_norm_eps
    if gemma:
        assert ours.attention_softcap == (theirs.attn_logit_softcapping or 0.0)
        assert ours.logit_softcap == (theirs.final_logit_softcapping or 0.0)
        assert math.isclose(ours.query_scale, theirs.query_pre_attn_scalar**-0.5)
    if ours.num_experts:
        assert ours.experts_per_token == theirs.num_experts_per_tok
    back = to_hf(ours)
    assert from_hf(back) == ours
    again: Any = CONFIG_MAPPING[raw["model_type"]](**copy.deepcopy(back))
    rotated = again.rope_parameters
    names = ("full_attention", "sliding_attention")
    kept = tuple(rope_of(rotated[n]) for n in names) if len(expected) == 2 else (rope_of(rotated),)
    assert kept == expected
    assert not types or getattr(again, "layer_types", types) == types


def test_where_the_spellings_differ_rope_scaling_wins() -> None:
    raw: dict[str, Any] = {
        "model_type": "llama", "vocab_size": 50, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "rope_theta": 500_000.0, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    }  # fmt: skip
    found: ModelConfig = from_hf(raw)
    assert found.ropes == (Rope(theta=500_000.0, kind="linear", factor=2.0),)
