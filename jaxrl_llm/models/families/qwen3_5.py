"""Qwen3.5: three layers of the gated delta rule to one of gated attention; dense, and with experts."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.config.groups import DeltaRule, LayerKind
from jaxrl_llm.models.families.family import FULL, Tensor, Values, family, full, stacked_experts
from jaxrl_llm.models.kinds import given, or_null, whole
from jaxrl_llm.utils.errors import InputError

LINEAR = "linear_attention"


def _types(raw: Values, where: str) -> list[str]:
    every = given(raw, "full_attention_interval", 4)
    return raw.get("layer_types") or [FULL if (i + 1) % every == 0 else LINEAR for i in range(raw["num_hidden_layers"])]


def _read(raw: Values, where: str) -> dict[str, Any]:
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
    types = _types(raw, where)
    if set(types) - {FULL, LINEAR}:
        raise InputError(f"{where}: layer_types of {raw['model_type']} are {FULL} and {LINEAR}")
    kinds = (LayerKind("linear", (("delta", delta),)), LayerKind("full"))
    return {
        "qk_norm": True, "norm_offset": 1.0, "gated_attention": True, "kinds": kinds,
        "kind_of_layer": tuple(int(each == FULL) for each in types),
    }  # fmt: skip


def _read_moe(raw: Values, where: str) -> dict[str, Any]:
    return _read(raw, where) | {
        "num_experts": raw["num_experts"], "intermediate_size": raw["moe_intermediate_size"], "normalise_router": True,
        "shared_size": raw["shared_expert_intermediate_size"], "shared_gate": True,
    }  # fmt: skip


def _write(config: ModelConfig) -> dict[str, Any]:
    delta = config.each_kind[0].delta
    assert delta is not None
    return {
        "layer_types": [FULL if kind else LINEAR for kind in config.kind_of_layer], "attention_bias": False,
        "linear_num_key_heads": delta.keys, "linear_num_value_heads": delta.values, "linear_key_head_dim": delta.key,
        "linear_value_head_dim": delta.value, "linear_conv_kernel_dim": delta.taps,
    }  # fmt: skip


def _write_moe(config: ModelConfig) -> dict[str, Any]:
    return _write(config) | {
        "num_experts": config.num_experts, "moe_intermediate_size": config.intermediate_size,
        "shared_expert_intermediate_size": config.shared_size,
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
_TENSORS = (
    Tensor("self_attn.q_proj.weight", ("query", "query_gate"), by_head=True),
    Tensor("linear_attn.in_proj_qkv.weight", ("delta_query", "delta_key", "delta_value")),
    Tensor("linear_attn.in_proj_z.weight", ("delta_gate",)),
    Tensor("linear_attn.conv1d.weight", ("query_taps", "key_taps", "value_taps")),
)
QWEN3_5 = family(
    "Qwen3_5ForCausalLM", read=_read, write=_write, tensors=_TENSORS, num_key_value_heads=4, **_COMMON,
)  # fmt: skip
QWEN3_5_MOE = family(
    "Qwen3_5MoeForCausalLM", read=_read_moe, write=_write_moe, num_key_value_heads=2, num_experts_per_tok=8,
    num_experts=256, moe_intermediate_size=512, shared_expert_intermediate_size=512, intermediate_size=512,
    tensors=(
        *_TENSORS,
        *(Tensor(f"mlp.shared_expert.{name}_proj.weight", (f"shared_{name}",)) for name in ("gate", "up", "down")),
    ),
    others=stacked_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), **_COMMON,
)  # fmt: skip
