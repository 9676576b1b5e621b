"""GLM-4, the mixture GLM-4.5, and DeepSeek-V3, whose mixture that is, with attention to compressed keys and values."""

import math
from typing import Any

from jaxrl_llm.models.config import Latent, ModelConfig
from jaxrl_llm.models.config.rope import mscale, rope_to_hf
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


def _mixture(raw: Values, where: str) -> dict[str, Any]:
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
    """The settings from which `_mixture` reads the same."""
    dense = config.kind_of_layer.count(0) if config.kinds else 0
    wide = config.each_kind[0].intermediate_size
    return {
        "n_routed_experts": config.num_experts, "moe_intermediate_size": config.intermediate_size,
        "n_shared_experts": config.shared_size // config.intermediate_size, "n_group": config.router_groups,
        "topk_group": config.router_chosen_groups, "routed_scaling_factor": config.router_scale,
        "norm_topk_prob": config.normalise_router, "first_k_dense_replace": dense, "intermediate_size": wide,
        "num_nextn_predict_layers": 0,
    }  # fmt: skip


GLM4 = family(
    "Glm4ForCausalLM", partial=True, types=full, pad_token_id=151329,
    read=lambda raw, where: {
        "attention_bias": bool(raw["attention_bias"]), "post_norms": True, "interleaved_rotation": True,
    },
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
    "Glm4MoeForCausalLM", partial=True, types=full, settings=ROUTER_SETTINGS,
    read=lambda raw, where: _mixture(raw, where) | {
        "attention_bias": bool(raw["attention_bias"]), "qk_norm": bool(raw.get("use_qk_norm")),
    },
    write=lambda c: write_mixture(c) | {"attention_bias": c.attention_bias, "use_qk_norm": c.qk_norm},
    max_position_embeddings=131_072, num_key_value_heads=8, rms_norm_eps=1e-5, attention_bias=False,
    partial_rotary_factor=0.5, moe_intermediate_size=1408, num_experts_per_tok=8, n_shared_experts=1,
    n_routed_experts=128, routed_scaling_factor=1.0, n_group=1, topk_group=1, first_k_dense_replace=1,
    norm_topk_prob=True, use_qk_norm=False, **EXPERT_TENSORS,
)  # fmt: skip


_SIZES = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")


def _read(raw: Values, where: str) -> dict[str, Any]:
    if raw.get("attention_bias"):
        raise InputError(f"{where}: attention_bias of a deepseek_v3 model is not supported")
    query = int(raw.get("q_lora_rank") or 0)
    latent = Latent(query, raw["kv_lora_rank"], raw["qk_nope_head_dim"], raw["qk_rope_head_dim"], raw["v_head_dim"])
    scale = (latent.plain + latent.rotated) ** -0.5
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if rope.get("mscale_all_dim") and (rope.get("rope_type") or rope.get("type") or "default") != "default":
        scale *= mscale(float(rope["factor"]), float(rope["mscale_all_dim"])) ** 2
    return _mixture(raw, where) | {
        "latent": latent, "head_dim": latent.plain + latent.rotated, "query_scale": scale,
        "num_kv_heads": raw["num_attention_heads"], "interleaved_rotation": bool(raw["rope_interleave"]),
    }  # fmt: skip


def _write(config: ModelConfig) -> dict[str, Any]:
    latent, rope = config.latent, config.ropes[0]
    assert latent is not None
    found = write_mixture(config) | {
        "q_lora_rank": latent.query_rank or None, "kv_lora_rank": latent.rank, "qk_nope_head_dim": latent.plain,
        "qk_rope_head_dim": latent.rotated, "v_head_dim": latent.value, "head_dim": latent.rotated,
        "qk_head_dim": config.head_dim, "rope_interleave": config.interleaved_rotation, "attention_bias": False,
    }  # fmt: skip
    growth = (config.query_scale * config.head_dim**0.5) ** 0.5  # of attention, by which rotations of yarn are scaled
    if rope.kind == "yarn" and growth > 1 + 1e-9:
        of_all = (growth - 1) / (0.1 * math.log(rope.factor))
        own = ((rope.attention_factor or mscale(rope.factor, 1.0)) * growth - 1) / (0.1 * math.log(rope.factor))
        scaling = {k: v for k, v in rope_to_hf(rope).items() if k != "attention_factor"}
        found["rope_parameters"] = scaling | {"mscale": round(own, 12), "mscale_all_dim": round(of_all, 12)}
    return found


DEEPSEEK_V3 = family(
    "DeepseekV3ForCausalLM", read=_read, write=_write, types=full,
    settings=ROUTER_SETTINGS | dict.fromkeys(_SIZES, whole(1, 2**16)) | {
        "q_lora_rank": or_null(whole(1, 2**16)), "rope_interleave": or_null(FLAG),
        "qk_head_dim": or_null(whole(1)), "head_dim": or_null(whole(1)),  # of others above
    },
    max_position_embeddings=4096, rms_norm_eps=1e-6, moe_intermediate_size=2048, n_shared_experts=1,
    n_routed_experts=256, routed_scaling_factor=2.5, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
    v_head_dim=128, qk_nope_head_dim=128, n_group=8, topk_group=4, num_experts_per_tok=8, first_k_dense_replace=3,
    norm_topk_prob=True, rope_interleave=True,
    tensors=(Tensor("self_attn.kv_b_proj.weight", ("key_out", "value_out"), by_head=True),), **EXPERT_TENSORS,
)  # fmt: skip
