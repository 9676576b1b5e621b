"""OLMo 3: norms after attention and MLP only, and of all heads together."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families.family import (
    FULL,
    SLIDING,
    Tensor,
    Values,
    biases,
    family,
    layer_types,
    listed,
    ropes_by_type,
)
from jaxrl_llm.models.kinds import given


def _read(raw: Values, where: str) -> dict[str, Any]:
    return biases(raw) | {"pre_norms": False, "post_norms": True, "joint_qk_norm": True}


def _thetas(raw: Values) -> dict[str, float]:
    theta = float(given(raw, "rope_theta", 500_000.0))
    return {FULL: theta, SLIDING: theta}


def _write(config: ModelConfig) -> dict[str, Any]:
    full = ropes_by_type(config)[FULL]
    return {
        "layer_types": layer_types(config), "attention_bias": config.attention_bias,
        "rope_parameters": ropes_by_type(config), "rope_theta": full["rope_theta"],
    }  # fmt: skip


OLMO3 = family(
    "Olmo3ForCausalLM", read=_read, write=_write,
    types=partial(listed, otherwise=lambda layer: (layer + 1) % 4 != 0), thetas=_thetas, max_position_embeddings=2048,
    pad_token_id=1,
    rms_norm_eps=1e-5, rope_theta=500_000.0, sliding_window=4096,
    tensors=(
        Tensor("post_attention_layernorm.weight", ("attention_post_norm",)),
        Tensor("post_feedforward_layernorm.weight", ("mlp_post_norm",)),
        Tensor("self_attn.q_norm.weight", ("query_joint_norm",)),
        Tensor("self_attn.k_norm.weight", ("key_joint_norm",)),
    ),
)  # fmt: skip
