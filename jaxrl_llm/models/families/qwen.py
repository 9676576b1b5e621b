"""Qwen 2 and 3, and their mixtures."""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families.family import (
    Tensor,
    Values,
    all_alike,
    biases,
    dense_and_sparse,
    family,
    full,
    layer_types,
    listed,
    sliding,
    stacked_experts,
)
from jaxrl_llm.models.kinds import FLAG, given, list_of, or_null, whole
from jaxrl_llm.utils.errors import InputError

_WINDOWS = {"use_sliding_window": or_null(FLAG), "max_window_layers": or_null(whole(0))}
_MIXTURE = {"decoder_sparse_step": or_null(whole(1)), "mlp_only_layers": or_null(list_of(whole(0)))}
_FUSED = stacked_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def _types(raw: Values, where: str, slides: Callable[[int, int], bool] = operator.ge) -> list[str]:
    """slides: (number of a layer, max_window_layers) -> whether it has a window."""
    if not raw.get("use_sliding_window"):
        raw = raw | {"sliding_window": None}
    mark = given(raw, "max_window_layers", 28)
    return listed(raw, where, lambda layer: slides(layer, mark), " with use_sliding_window true")


def _types_of_moe(raw: Values, where: str) -> list[str]:
    return all_alike(raw, where) if raw.get("use_sliding_window") else full(raw, where)


def _qwen2(raw: Values, where: str) -> dict[str, Any]:
    return {"attention_bias": True}


def _qwen3(raw: Values, where: str) -> dict[str, Any]:
    return biases(raw) | {"qk_norm": True}


def _mixture(raw: Values, where: str) -> dict[str, Any]:
    """Experts in all layers but some that are dense: those listed, and all but every decoder_sparse_step-th."""
    if "moe_intermediate_size" not in raw:
        raise InputError(f"{where} lacks 'moe_intermediate_size'")
    fields: dict[str, Any] = {
        "num_experts": int(raw.get("num_local_experts") or raw.get("num_experts") or 0),
        "intermediate_size": raw["moe_intermediate_size"], "normalise_router": bool(raw.get("norm_topk_prob", False)),
    }  # fmt: skip
    every, dense = given(raw, "decoder_sparse_step", 1), raw.get("mlp_only_layers") or ()
    sparse = tuple((i + 1) % every == 0 and i not in dense for i in range(raw["num_hidden_layers"]))
    if not all(sparse):
        fields |= dense_and_sparse(sparse, raw["intermediate_size"], shared_gate=False)
    return fields


def _qwen3_moe(raw: Values, where: str) -> dict[str, Any]:
    return _qwen3(raw, where) | _mixture(raw, where)


def _qwen2_moe(raw: Values, where: str) -> dict[str, Any]:
    return _mixture(raw, where) | {
        "attention_bias": bool(raw["qkv_bias"]), "shared_size": raw["shared_expert_intermediate_size"],
        "shared_gate": True,
    }  # fmt: skip


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    slides = sliding(config)
    first = slides.index(True) if any(slides) else config.num_layers
    return {"use_sliding_window": any(slides), "max_window_layers": first}


def _write_qwen2(config: ModelConfig) -> dict[str, Any]:
    return _write_windows(config) | {"layer_types": layer_types(config)}


def _write_qwen3(config: ModelConfig) -> dict[str, Any]:
    return _write_qwen2(config) | {"attention_bias": config.attention_bias}


def _write_mixture(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_experts": config.num_experts, "moe_intermediate_size": config.intermediate_size,
        "norm_topk_prob": config.normalise_router, "decoder_sparse_step": 1,
        "intermediate_size": config.each_kind[0].intermediate_size,
        "mlp_only_layers": [layer for layer, kind in enumerate(config.kind_of_layer) if not kind],
    }  # fmt: skip


def _write_qwen3_moe(config: ModelConfig) -> dict[str, Any]:
    return _write_windows(config) | _write_mixture(config) | {"attention_bias": config.attention_bias}


def _write_qwen2_moe(config: ModelConfig) -> dict[str, Any]:
    return _write_qwen2(config) | _write_mixture(config) | {
        "qkv_bias": config.attention_bias, "shared_expert_intermediate_size": config.shared_size,
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
    "Qwen3MoeForCausalLM", "qwen3moe", read=_qwen3_moe, write=_write_qwen3_moe, types=_types_of_moe,
    settings=_WINDOWS | _MIXTURE,
    num_key_value_heads=4, num_experts_per_tok=8, sliding_window=4096, others=_FUSED,
)  # fmt: skip
QWEN2_MOE = family(
    "Qwen2MoeForCausalLM", read=_qwen2_moe, write=_write_qwen2_moe,
    types=partial(_types, slides=lambda layer, most: layer % 2 == 0 and layer < most),
    settings=_WINDOWS | _MIXTURE | {"qkv_bias": FLAG, "shared_expert_intermediate_size": whole(1, 2**24)},
    num_key_value_heads=16, num_experts_per_tok=4, num_experts=60, sliding_window=4096, qkv_bias=True,
    intermediate_size=5632, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
    tensors=tuple(
        Tensor(f"mlp.shared_expert.{name}_proj.weight", (f"shared_{name}",)) for name in ("gate", "up", "down")
    ),
    others=_FUSED,
)  # fmt: skip
