"""Llama and what is Llama but for a few settings: Mistral, SmolLM3, Granite, Mixtral, Phi-3 and 4, OLMo 3, LLaDA."""

from functools import partial
from typing import Any

from jaxrl_llm.models.config import ModelConfig, Unmasking
from jaxrl_llm.models.config.rope import Rope
from jaxrl_llm.models.families.family import (
    FULL,
    SLIDING,
    Tensor,
    Values,
    biases,
    family,
    full,
    layer_types,
    ropes_by_type,
    stacked_experts,
    types_of,
)
from jaxrl_llm.models.kinds import FLAG, TEXT, given, list_of, number, or_null, whole
from jaxrl_llm.utils.errors import InputError

_BIAS = {"attention_bias": or_null(FLAG), "mlp_bias": or_null(FLAG)}


def _biases(raw: Values, where: str) -> dict[str, Any]:
    return biases(raw) | {"mlp_bias": bool(raw.get("mlp_bias"))}


def _write_biases(config: ModelConfig) -> dict[str, Any]:
    return {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}


def _smollm3_rotated(raw: Values) -> list[bool]:
    """Which layers rotate their heads."""
    marks, every = raw.get("no_rope_layers"), raw["no_rope_layer_interval"]
    return [bool(marks[i]) if marks else (i + 1) % every != 0 for i in range(raw["num_hidden_layers"])]


def _smollm3_types(raw: Values, where: str) -> list[str]:
    if not raw.get("use_sliding_window"):
        return full(raw, where)
    rotated = _smollm3_rotated(raw)
    return types_of(raw, where, lambda layer: not rotated[layer])


LLAMA = family(
    "LlamaForCausalLM", "llama", read=_biases, write=_write_biases, types=full, settings=_BIAS,
    max_position_embeddings=2048,
)  # fmt: skip
_MISTRAL3: dict[str, Any] = {
    "prefixes": ("model.language_model.", "language_model.model.", "language_model."),
    "skipped": ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
}  # fmt: skip
MISTRAL = family(
    "MistralForCausalLM", num_key_value_heads=8, max_position_embeddings=131_072, sliding_window=4096, **_MISTRAL3,
)  # fmt: skip
MINISTRAL3 = family(
    "Ministral3ForCausalLM", num_key_value_heads=8, max_position_embeddings=262_144, rms_norm_eps=1e-5,
    pad_token_id=11, sliding_window=None, **_MISTRAL3,
)  # fmt: skip
MIXTRAL = family(
    "MixtralForCausalLM", "llama", write=lambda c: {"num_local_experts": c.num_experts},
    read=lambda raw, where: {
        "num_experts": int(raw.get("num_local_experts") or raw.get("num_experts") or 0), "normalise_router": True,
    },
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
    "SmolLM3ForCausalLM", types=_smollm3_types, num_key_value_heads=4, pad_token_id=128004,
    read=lambda raw, where: _biases(raw, where) | {
        "rope_of_layer": tuple(int(not rotated) for rotated in _smollm3_rotated(raw)),
        "more_ropes": (Rope(kind="none"),),
    },
    write=lambda config: _write_biases(config) | {
        "no_rope_layers": [int(config.ropes[rope].kind != "none") for rope in config.rope_of_layer],
        "use_sliding_window": any(config.window_of_layer), "layer_types": layer_types(config),
    },
    sliding_window=None, rope_theta=2_000_000.0, no_rope_layer_interval=4, tie_word_embeddings=True,
    settings=_BIAS | {"no_rope_layers": or_null(list_of(whole(0, 1))), "no_rope_layer_interval": whole(1)},
)  # fmt: skip
GRANITE = family(
    "GraniteForCausalLM", types=full, max_position_embeddings=2048,
    read=lambda raw, where: _biases(raw, where) | {
        "embedding_scale": float(raw["embedding_multiplier"]), "residual_scale": float(raw["residual_multiplier"]),
        "query_scale": float(raw["attention_multiplier"]), "logit_scale": 1.0 / float(raw["logits_scaling"]),
    },
    write=lambda config: _write_biases(config) | {
        "embedding_multiplier": config.embedding_scale, "residual_multiplier": config.residual_scale,
        "attention_multiplier": config.query_scale, "logits_scaling": 1.0 / config.logit_scale,
    },
    embedding_multiplier=1.0, residual_multiplier=1.0, attention_multiplier=1.0, logits_scaling=1.0,
    settings=_BIAS | dict.fromkeys(
        ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling"), number(above=0)),
)  # fmt: skip
PHI3 = family(
    "Phi3ForCausalLM", partial=True, max_position_embeddings=4096, rms_norm_eps=1e-5, sliding_window=None,
    pad_token_id=32000, settings={"original_max_position_embeddings": or_null(whole(1))},
    write=lambda config: {"original_max_position_embeddings": config.ropes[0].original_length or config.max_positions},
    tensors=(
        Tensor("self_attn.qkv_proj.weight", ("query", "key", "value")),
        Tensor("mlp.gate_up_proj.weight", ("gate", "up")),
    ),
)  # fmt: skip


OLMO3 = family(
    "Olmo3ForCausalLM",
    read=lambda raw, where: biases(raw) | {"pre_norms": False, "post_norms": True, "joint_qk_norm": True},
    write=lambda config: {
        "layer_types": layer_types(config), "attention_bias": config.attention_bias,
        "rope_parameters": ropes_by_type(config), "rope_theta": config.ropes[0].theta,
    },
    types=partial(types_of, otherwise=lambda layer: (layer + 1) % 4 != 0),
    thetas=lambda raw: dict.fromkeys((FULL, SLIDING), float(given(raw, "rope_theta", 500_000.0))),
    max_position_embeddings=2048, pad_token_id=1, rms_norm_eps=1e-5, rope_theta=500_000.0, sliding_window=4096,
    tensors=(
        Tensor("post_attention_layernorm.weight", ("attention_post_norm",)),
        Tensor("post_feedforward_layernorm.weight", ("mlp_post_norm",)),
        Tensor("self_attn.q_norm.weight", ("query_joint_norm",)),
        Tensor("self_attn.k_norm.weight", ("key_joint_norm",)),
    ),
)  # fmt: skip


_USUAL = Unmasking(0)
_OF_LAYER = "model.transformer.blocks.{layer}."
# What makes other models of the same code: only these values are read.
_ONLY: dict[str, Any] = {
    "block_type": "llama", "layer_norm_type": "rms", "rope": True, "alibi": False, "include_bias": False,
    "include_qkv_bias": False, "attention_layer_norm": False, "block_group_size": 1, "scale_logits": False,
    "input_emb_norm": False, "multi_query_attention": None, "clip_qkv": None,
}  # fmt: skip


def _read(raw: Values, where: str) -> dict[str, Any]:
    for name, only in _ONLY.items():
        if name in raw and raw[name] not in (only, None):
            raise InputError(f"{where}: {name} is {raw[name]!r}, but of LLaDA only {only!r} is supported")
    size = raw.get("embedding_size") or raw["vocab_size"]
    block, at_a_time = raw.get("block_length") or _USUAL.block, raw.get("tokens_per_step") or _USUAL.at_a_time
    if raw["mask_token_id"] >= size:
        raise InputError(f"{where}: mask_token_id {raw['mask_token_id']} is not in the vocabulary of {size} tokens")
    return {"vocab_size": size, "unmasking": Unmasking(raw["mask_token_id"], block, min(at_a_time, block))}


def _write(config: ModelConfig) -> dict[str, Any]:
    own = config.unmasking or _USUAL
    return {
        "embedding_size": config.vocab_size, "mask_token_id": own.mask_token, "block_length": own.block,
        "tokens_per_step": own.at_a_time, "block_type": "llama", "layer_norm_type": "rms", "rope": True,
        "include_bias": False, "include_qkv_bias": False,
    }  # fmt: skip


LLADA = family(
    "LLaDAModelLM", read=_read, write=_write, types=full, max_position_embeddings=4096, rms_norm_eps=1e-5,
    rope_theta=500_000.0, mask_token_id=126_336,
    settings={
        "mask_token_id": whole(0), "embedding_size": or_null(whole(1)), "block_length": or_null(whole(1)),
        "tokens_per_step": or_null(whole(1)), "block_type": TEXT, "layer_norm_type": TEXT, "rope": FLAG,
        "include_bias": FLAG, "include_qkv_bias": or_null(FLAG),
    },
    spelled={
        "hidden_size": "d_model", "num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads",
        "num_hidden_layers": "n_layers", "intermediate_size": "mlp_hidden_size",
        "max_position_embeddings": "max_sequence_length", "tie_word_embeddings": "weight_tying",
        "hidden_act": "activation_type",
    },
    tensors=(
        Tensor("model.transformer.wte.weight", ("embed",)), Tensor("model.transformer.ln_f.weight", ("final_norm",)),
        Tensor("model.transformer.ff_out.weight", ("unembed",)),
        *(Tensor(f"{_OF_LAYER}{stored}.weight", (name,)) for name, stored in (
            ("attention_norm", "attn_norm"), ("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"),
            ("out", "attn_out"), ("mlp_norm", "ff_norm"), ("gate", "ff_proj"), ("up", "up_proj"),
            ("down", "ff_out"),
        )),
    ),
)  # fmt: skip
