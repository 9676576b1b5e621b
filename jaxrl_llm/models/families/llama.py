"""Llama, and what is Llama but for a few settings: Mistral, Ministral 3, SmolLM3, Granite, Mixtral, Phi-3 and 4."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.config.rope import Rope
from jaxrl_llm.models.families.family import Tensor, Values, biases, family, full, layer_types, listed, stacked_experts
from jaxrl_llm.models.kinds import FLAG, list_of, number, or_null, whole

_BIAS = {"attention_bias": or_null(FLAG), "mlp_bias": or_null(FLAG)}


def _biases(raw: Values, where: str) -> dict[str, Any]:
    return biases(raw) | {"mlp_bias": bool(raw.get("mlp_bias"))}


def _write_biases(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}


def _granite(raw: Values, where: str) -> dict[str, Any]:
    return _biases(raw, where) | {
        "embedding_scale": float(raw["embedding_multiplier"]), "residual_scale": float(raw["residual_multiplier"]),
        "query_scale": float(raw["attention_multiplier"]), "logit_scale": 1.0 / float(raw["logits_scaling"]),
    }  # fmt: skip


def _write_granite(config: ModelConfig) -> dict[str, Any]:
    return _write_biases(config) | {
        "embedding_multiplier": config.embedding_scale, "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.query_scale, "logits_scaling": 1.0 / config.logit_scale,
    }  # fmt: skip


def _smollm3_rotated(raw: Values) -> list[bool]:
    """Which layers rotate their heads."""
    marks, every = raw.get("no_rope_layers"), raw["no_rope_layer_interval"]
    layers = range(raw["num_hidden_layers"])
    return [bool(marks[i]) if marks else (i + 1) % every != 0 for i in layers]


def _smollm3_types(raw: Values, where: str) -> list[str]:
    if not raw.get("use_sliding_window"):
        return full(raw, where)
    rotated = _smollm3_rotated(raw)
    return listed(raw, where, lambda layer: not rotated[layer])


def _smollm3(raw: Values, where: str) -> dict[str, Any]:
    rotated = _smollm3_rotated(raw)
    of_layer = tuple(0 if turned else 1 for turned in rotated)
    return _biases(raw, where) | {"rope_of_layer": of_layer, "more_ropes": (Rope(kind="none"),)}


def _write_smollm3(config: ModelConfig) -> dict[str, Any]:
    slides = any(config.window_of_layer)
    return _write_biases(config) | {
        "no_rope_layers": [int(config.ropes[rope].kind != "none") for rope in config.rope_of_layer],
        "use_sliding_window": slides, "layer_types": layer_types(config),
    }  # fmt: skip


def _mixtral(raw: Values, where: str) -> dict[str, Any]:
    return {"num_experts": int(raw.get("num_local_experts") or raw.get("num_experts") or 0), "normalise_router": True}


_POSITIVE = number(above=0)
_RMS, _THETA = {"rms_norm_eps": 1e-6}, {"rope_theta": 1_000_000.0}
LLAMA = family(
    "LlamaForCausalLM", "llama", read=_biases, write=_write_biases, types=full, settings=_BIAS,
    max_position_embeddings=2048,
)  # fmt: skip
_MISTRAL3: dict[str, Any] = {
    "prefixes": ("model.language_model.", "language_model.model.", "language_model."),
    "skipped": (
        "vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.",
    ),
}  # fmt: skip
MISTRAL = family(
    "MistralForCausalLM", num_key_value_heads=8, max_position_embeddings=131_072, sliding_window=4096, **_MISTRAL3,
)  # fmt: skip
MINISTRAL3 = family(
    "Ministral3ForCausalLM", num_key_value_heads=8, max_position_embeddings=262_144, rms_norm_eps=1e-5,
    pad_token_id=11,
    sliding_window=None, **_MISTRAL3,
)  # fmt: skip
MIXTRAL = family(
    "MixtralForCausalLM", "llama", read=_mixtral, write=lambda c: {"num_local_experts": c.num_experts},
    max_position_embeddings=131_072, num_key_value_heads=8, rms_norm_eps=1e-5, sliding_window=None,
    num_experts_per_tok=2, rope_theta=1_000_000.0,
    tensors=(
        Tensor("block_sparse_moe.gate.weight", ("router",)),
        *(Tensor(f"block_sparse_moe.experts.{{expert}}.{stored}.weight", (name,))
          for name, stored in (("gate", "w1"), ("up", "w3"), ("down", "w2"))),
    ),
    others=(
        Tensor("mlp.gate.weight", ("router",)),
        *stacked_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
    ),
)  # fmt: skip
SMOLLM3 = family(
    "SmolLM3ForCausalLM", read=_smollm3, write=_write_smollm3, types=_smollm3_types, num_key_value_heads=4,
    pad_token_id=128004,
    sliding_window=None, rope_theta=2_000_000.0, no_rope_layer_interval=4, tie_word_embeddings=True,
    settings=_BIAS | {"no_rope_layers": or_null(list_of(whole(0, 1))), "no_rope_layer_interval": whole(1)},
)  # fmt: skip
GRANITE = family(
    "GraniteForCausalLM", read=_granite, write=_write_granite, types=full, max_position_embeddings=2048,
    embedding_multiplier=1.0, residual_multiplier=1.0, attention_multiplier=1.0, logits_scaling=1.0,
    settings=_BIAS | dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), _POSITIVE),
)  # fmt: skip
PHI3 = family(
    "Phi3ForCausalLM", partial=True, max_position_embeddings=4096, rms_norm_eps=1e-5, sliding_window=None,
    pad_token_id=32000,
    settings={"original_max_position_embeddings": or_null(whole(1))},
    write=lambda config: {"original_max_position_embeddings": config.ropes[0].original_length or config.max_positions},
    tensors=(
        Tensor("self_attn.qkv_proj.weight", ("query", "key", "value")),
        Tensor("mlp.gate_up_proj.weight", ("gate", "up")),
    ),
)  # fmt: skip
