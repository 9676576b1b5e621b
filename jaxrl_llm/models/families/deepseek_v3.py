"""DeepSeek-V3: attention to compressed keys and values, and a mixture with shared experts."""

from __future__ import annotations

import math
from typing import Any

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.config.groups import Latent
from jaxrl_llm.models.config.rope import mscale, rope_to_hf
from jaxrl_llm.models.families.family import Tensor, Values, family, full
from jaxrl_llm.models.families.glm4 import EXPERT_TENSORS, ROUTER_SETTINGS, mixture, write_mixture
from jaxrl_llm.models.kinds import FLAG, or_null, whole
from jaxrl_llm.utils.errors import InputError

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
    return mixture(raw, where) | {
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
