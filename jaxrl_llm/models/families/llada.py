"""LLaDA (Large Language Diffusion Models, 2502.09992): Llama whose tokens see their whole row."""

from __future__ import annotations

from typing import Any

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.config.groups import Unmasking
from jaxrl_llm.models.families.family import Tensor, Values, family, full
from jaxrl_llm.models.kinds import FLAG, TEXT, or_null, whole
from jaxrl_llm.utils.errors import InputError

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
