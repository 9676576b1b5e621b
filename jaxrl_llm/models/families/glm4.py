"""GLM-4, and the mixture GLM-4.5."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families.family import Tensor, Values, dense_and_sparse, family, full, stacked_experts
from jaxrl_llm.models.kinds import FLAG, number, or_null, whole
from jaxrl_llm.utils.errors import InputError

ROUTER_SETTINGS = {
    "n_routed_experts": whole(1, 2**16), "n_shared_experts": or_null(whole(0)), "n_group": or_null(whole(1)),
    "topk_group": or_null(whole(1)), "routed_scaling_factor": number(above=0), "first_k_dense_replace": whole(0),
    "use_qk_norm": or_null(FLAG),
}  # fmt: skip
EXPERT_TENSORS: dict[str, Any] = {
    "others": stacked_experts("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), "skipped": ("mtp.",),
}  # fmt: skip


def _glm4(raw: Values, where: str) -> dict[str, Any]:
    return {"attention_bias": bool(raw["attention_bias"]), "post_norms": True, "interleaved_rotation": True}


def mixture(raw: Values, where: str) -> dict[str, Any]:
    """Experts with sigmoid scores, corrected for the choice, in groups; the first layers are dense (DeepSeek-V3)."""
    groups, chosen = int(raw.get("n_group") or 1), int(raw.get("topk_group") or 1)
    if raw["n_routed_experts"] % groups or chosen > groups:
        raise InputError(
            f"{where}: n_group {groups} must divide the {raw['n_routed_experts']} experts, and topk_group {chosen} be "
            "at most as many"
        )
    fields = {
        "num_experts": raw["n_routed_experts"], "intermediate_size": raw["moe_intermediate_size"],
        "shared_size": int(raw.get("n_shared_experts") or 0) * raw["moe_intermediate_size"],
        "router_sigmoid": True, "router_correction": True, "router_groups": groups, "router_chosen_groups": chosen,
        "router_scale": float(raw["routed_scaling_factor"]), "normalise_router": bool(raw["norm_topk_prob"]),
    }  # fmt: skip
    dense = min(int(raw["first_k_dense_replace"]), raw["num_hidden_layers"])
    if dense:
        sparse = [layer >= dense for layer in range(raw["num_hidden_layers"])]
        fields |= dense_and_sparse(sparse, raw["intermediate_size"], router_correction=False)
    return fields


def write_mixture(config: ModelConfig) -> dict[str, Any]:
    """The settings from which `mixture` reads the same."""
    dense = config.kind_of_layer.count(0) if config.kinds else 0
    wide = config.each_kind[0].intermediate_size
    return {
        "n_routed_experts": config.num_experts, "moe_intermediate_size": config.intermediate_size,
        "n_shared_experts": config.shared_size // config.intermediate_size, "n_group": config.router_groups,
        "topk_group": config.router_chosen_groups, "routed_scaling_factor": config.router_scale,
        "norm_topk_prob": config.normalise_router, "first_k_dense_replace": dense, "intermediate_size": wide,
        "num_nextn_predict_layers": 0,
    }  # fmt: skip


def _glm4_moe(raw: Values, where: str) -> dict[str, Any]:
    return mixture(raw, where) | {
        "attention_bias": bool(raw["attention_bias"]), "qk_norm": bool(raw.get("use_qk_norm")),
    }  # fmt: skip


def _write_moe(config: ModelConfig) -> dict[str, Any]:
    return write_mixture(config) | {"attention_bias": config.attention_bias, "use_qk_norm": config.qk_norm}


GLM4 = family(
    "Glm4ForCausalLM", partial=True, read=_glm4, types=full,
    pad_token_id=151329,
    write=lambda config: {"attention_bias": config.attention_bias},
    max_position_embeddings=131_072, num_key_value_heads=2, head_dim=128, rms_norm_eps=1.5625e-7, attention_bias=True,
    partial_rotary_factor=0.5,
    tensors=(
        Tensor("post_self_attn_layernorm.weight", ("attention_post_norm",)),
        Tensor("post_mlp_layernorm.weight", ("mlp_post_norm",)),
        Tensor("mlp.gate_up_proj.weight", ("gate", "up")),
    ),
)  # fmt: skip
GLM4_MOE = family(
    "Glm4MoeForCausalLM", partial=True, read=_glm4_moe, write=_write_moe, types=full, settings=ROUTER_SETTINGS,
    max_position_embeddings=131_072, num_key_value_heads=8, rms_norm_eps=1e-5, attention_bias=False,
    partial_rotary_factor=0.5, moe_intermediate_size=1408, num_experts_per_tok=8, n_shared_experts=1,
    n_routed_experts=128, routed_scaling_factor=1.0, n_group=1, topk_group=1, first_k_dense_replace=1,
    norm_topk_prob=True, use_qk_norm=False, **EXPERT_TENSORS,
)  # fmt: skip
