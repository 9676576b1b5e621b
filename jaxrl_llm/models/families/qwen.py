"""Qwen 2, 3 and 3.5, and their mixtures; 3.5 has three layers of the gated delta rule to one of gated attention."""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from jaxrl_llm.models.config import DeltaRule, LayerKind, ModelConfig
from jaxrl_llm.models.families.family import (
    FULL,
    Tensor,
    Values,
    all_alike,
    biases,
    dense_and_sparse,
    family,
    full,
    layer_types,
    sliding,
    stacked_experts,
    types_of,
)
from jaxrl_llm.models.kinds import FLAG, given, list_of, or_null, whole
from jaxrl_llm.utils.errors import InputError

_WINDOWS = {"use_sliding_window": or_null(FLAG), "max_window_layers": or_null(whole(0))}
_MIXTURE = {"decoder_sparse_step": or_null(whole(1)), "mlp_only_layers": or_null(list_of(whole(0)))}
_FUSED = stacked_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
_PARTS = ("gate", "up", "down")
SHARED_EXPERT = tuple(Tensor(f"mlp.shared_expert.{name}_proj.weight", (f"shared_{name}",)) for name in _PARTS)


def _types(raw: Values, where: str, slides: Callable[[int, int], bool] = operator.ge) -> list[str]:
    """slides: (number of a layer, max_window_layers) -> whether it has a window."""
    if not raw.get("use_sliding_window"):
        raw = raw | {"sliding_window": None}
    mark = given(raw, "max_window_layers", 28)
    return types_of(raw, where, lambda layer: slides(layer, mark), " with use_sliding_window true")


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


def _write_windows(config: ModelConfig) -> dict[str, Any]:
    slides = sliding(config)
    return {"use_sliding_window": any(slides), "max_window_layers": [*slides, True].index(True)}


def _write_qwen2(config: ModelConfig) -> dict[str, Any]:
    return _write_windows(config) | {"layer_types": layer_types(config)}


def _write_mixture(config: ModelConfig) -> dict[str, Any]:
    return {
        "num_experts": config.num_experts, "moe_intermediate_size": config.intermediate_size,
        "norm_topk_prob": config.normalise_router, "decoder_sparse_step": 1,
        "intermediate_size": config.each_kind[0].intermediate_size,
        "mlp_only_layers": [layer for layer, kind in enumerate(config.kind_of_layer) if not kind],
    }  # fmt: skip


QWEN2 = family(
    "Qwen2ForCausalLM", "qwen2", read=lambda raw, where: {"attention_bias": True}, write=_write_qwen2, types=_types,
    settings=_WINDOWS, num_key_value_heads=32, sliding_window=4096,
)  # fmt: skip
QWEN3 = family(
    "Qwen3ForCausalLM", "qwen3", read=_qwen3, types=_types, settings=_WINDOWS,
    write=lambda config: _write_qwen2(config) | {"attention_bias": config.attention_bias},
    num_key_value_heads=32, head_dim=128, sliding_window=4096,
)  # fmt: skip
QWEN3_MOE = family(
    "Qwen3MoeForCausalLM", "qwen3moe", read=lambda raw, where: _qwen3(raw, where) | _mixture(raw, where),
    write=lambda c: _write_windows(c) | _write_mixture(c) | {"attention_bias": c.attention_bias},
    types=lambda raw, where: (all_alike if raw.get("use_sliding_window") else full)(raw, where),
    settings=_WINDOWS | _MIXTURE,
    num_key_value_heads=4, num_experts_per_tok=8, sliding_window=4096, others=_FUSED,
)  # fmt: skip
QWEN2_MOE = family(
    "Qwen2MoeForCausalLM",
    read=lambda raw, where: _mixture(raw, where) | {
        "attention_bias": bool(raw["qkv_bias"]), "shared_size": raw["shared_expert_intermediate_size"],
        "shared_gate": True,
    },
    write=lambda config: _write_qwen2(config) | _write_mixture(config) | {
        "qkv_bias": config.attention_bias, "shared_expert_intermediate_size": config.shared_size,
    },
    types=partial(_types, slides=lambda layer, most: layer % 2 == 0 and layer < most),
    settings=_WINDOWS | _MIXTURE | {"qkv_bias": FLAG, "shared_expert_intermediate_size": whole(1, 2**24)},
    num_key_value_heads=16, num_experts_per_tok=4, num_experts=60, sliding_window=4096, qkv_bias=True,
    intermediate_size=5632, moe_intermediate_size=1408, shared_expert_intermediate_size=5632,
    tensors=SHARED_EXPERT, others=_FUSED,
)  # fmt: skip


LINEAR = "linear_attention"


def _read_qwen3_5(raw: Values, where: str) -> dict[str, Any]:
    if raw.get("attention_bias"):
        raise InputError(f"{where}: attention_bias of a {raw['model_type']} model is not supported")
    delta = DeltaRule(
        raw["linear_num_key_heads"], raw["linear_num_value_heads"], raw["linear_key_head_dim"],
        raw["linear_value_head_dim"], raw["linear_conv_kernel_dim"],
    )  # fmt: skip
    if delta.values % delta.keys:
        raise InputError(
            f"{where}: linear_num_value_heads {delta.values} is no multiple of linear_num_key_heads {delta.keys}"
        )
    every, layers = given(raw, "full_attention_interval", 4), raw["num_hidden_layers"]
    types = raw.get("layer_types") or [FULL if (i + 1) % every == 0 else LINEAR for i in range(layers)]
    if set(types) - {FULL, LINEAR}:
        raise InputError(f"{where}: layer_types of {raw['model_type']} are {FULL} and {LINEAR}")
    kinds = (LayerKind("linear", (("delta", delta),)), LayerKind("full"))
    return {
        "qk_norm": True, "norm_offset": 1.0, "gated_attention": True, "kinds": kinds,
        "kind_of_layer": tuple(int(each == FULL) for each in types),
    }  # fmt: skip


def _write_qwen3_5(config: ModelConfig) -> dict[str, Any]:
    delta = config.each_kind[0].delta
    assert delta is not None
    return {
        "layer_types": [FULL if kind else LINEAR for kind in config.kind_of_layer], "attention_bias": False,
        "linear_num_key_heads": delta.keys, "linear_num_value_heads": delta.values, "linear_key_head_dim": delta.key,
        "linear_value_head_dim": delta.value, "linear_conv_kernel_dim": delta.taps,
    }  # fmt: skip


_NAMES = ("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim")
_COMMON: dict[str, Any] = {
    "types": full, "partial": True, "prefixes": ("model.language_model.", "language_model.model."),
    "skipped": ("model.visual.", "visual.", "mtp."), "head_dim": 256, "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "settings": dict.fromkeys((*_NAMES, "linear_conv_kernel_dim"), whole(1, 2**16)) | {
        "full_attention_interval": or_null(whole(1)), "shared_expert_intermediate_size": whole(1, 2**24),
    },
}  # fmt: skip
_QWEN3_5_TENSORS = (
    Tensor("self_attn.q_proj.weight", ("query", "query_gate"), by_head=True),
    Tensor("linear_attn.in_proj_qkv.weight", ("delta_query", "delta_key", "delta_value")),
    Tensor("linear_attn.in_proj_z.weight", ("delta_gate",)),
    Tensor("linear_attn.conv1d.weight", ("query_taps", "key_taps", "value_taps")),
)
QWEN3_5 = family(
    "Qwen3_5ForCausalLM", read=_read_qwen3_5, write=_write_qwen3_5, tensors=_QWEN3_5_TENSORS, num_key_value_heads=4,
    **_COMMON,
)  # fmt: skip
QWEN3_5_MOE = family(
    "Qwen3_5MoeForCausalLM",
    read=lambda raw, where: _read_qwen3_5(raw, where) | {
        "num_experts": raw["num_experts"], "intermediate_size": raw["moe_intermediate_size"], "normalise_router": True,
        "shared_size": raw["shared_expert_intermediate_size"], "shared_gate": True,
    },
    write=lambda config: _write_qwen3_5(config) | {
        "num_experts": config.num_experts, "moe_intermediate_size": config.intermediate_size,
        "shared_expert_intermediate_size": config.shared_size,
    },
    num_key_value_heads=2, num_experts_per_tok=8,
    num_experts=256, moe_intermediate_size=512, shared_expert_intermediate_size=512, intermediate_size=512,
    tensors=(*_QWEN3_5_TENSORS, *SHARED_EXPERT),
    others=stacked_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), **_COMMON,
)  # fmt: skip
