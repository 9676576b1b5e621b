"""Qwen 2 and 3, and the mixtures Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families.family import (
    Values,
    all_alike,
    family,
    full,
    layer_types,
    listed,
    sliding,
    stacked_experts,
)
from jaxrl_llm.models.kinds import FLAG, given, or_null, whole
from jaxrl_llm.utils.errors import InputError

_WINDOWS = {"use_sliding_window": or_null(FLAG), "max_window_layers": or_null(whole(0))}
_FUSED = stacked_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def _types(raw: Values, where: str) -> list[str]:
    if not raw.get("use_sliding_window"):
        raw = raw | {"sliding_window": None}
    first = given(raw, "max_window_layers", 28)
    return listed(raw, where, lambda layer: layer >= first, " with use_sliding_window true")


def _types_of_moe(raw: Values, where: str) -> list[str]:
    return all_alike(raw, where) if raw.get("use_sliding_window") else full(raw, where)


def _qwen2(raw: Values, where: str) -> dict[str, Any]:
    return {"attention_bias": True}


def _qwen3(raw: Values, where: str) -> dict[str, Any]:
    bias = bool(raw.get("attention_bias"))
    return {"attention_bias": bias, "output_bias": bias, "qk_norm": True}


def _qwen3_moe(raw: Values, where: str) -> dict[str, Any]:
    if raw.get("decoder_sparse_step", 1) != 1 or raw.get("mlp_only_layers"):
        raise InputError(
            f"{where}: Qwen3-MoE with some dense layers (mlp_only_layers, decoder_sparse_step) is not supported"
        )
    if "moe_intermediate_size" not in raw:
        raise InputError(f"{where} lacks 'moe_intermediate_size'")
    return _qwen3(raw, where) | {
        "num_experts": int(raw.get("num_local_experts") or raw.get("num_experts") or 0),
        "intermediate_size": raw["moe_intermediate_size"], "normalise_router": bool(raw.get("norm_topk_prob", False)),
    }  # fmt: skip


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    slides = sliding(config)
    first = slides.index(True) if any(slides) else config.num_layers
    return {"use_sliding_window": any(slides), "max_window_layers": first}


def _write_qwen2(config: ModelConfig) -> dict[str, Any]:
    return _write_windows(config) | {"layer_types": layer_types(config)}


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return _write_qwen2(config) | {"attention_bias": config.attention_bias}


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    return _write_windows(config) | {
        "attention_bias": config.attention_bias, "num_experts": config.num_experts,
        "moe_intermediate_size": config.intermediate_size, "norm_topk_prob": config.normalise_router,
        "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip


QWEN2 = family(
    "Qwen2ForCausalLM", "qwen2", read=_qwen2, write=_write_qwen2, types=_types, settings=_WINDOWS,
    num_key_value_heads=32, sliding_window=4096,
)  # fmt: skip
QWEN3 = family(
    "Qwen3ForCausalLM", "qwen3", read=_qwen3, write=_write_qwen3, types=_types, settings=_WINDOWS,
    num_key_value_heads=32, head_dim=128, sliding_window=4096,
)  # fmt: skip
QWEN3_MOE = family(
    "Qwen3MoeForCausalLM", "qwen3moe", read=_qwen3_moe, write=_write_qwen3_moe, types=_types_of_moe, settings=_WINDOWS,
    num_key_value_heads=4, num_experts_per_tok=8, sliding_window=4096, others=_FUSED,
)  # fmt: skip
