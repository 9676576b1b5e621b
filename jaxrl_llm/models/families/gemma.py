"""Gemma 2 and 3."""

from __future__ import annotations

from functools import partial
from typing import Any

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.families.family import (
    FULL,
    SLIDING,
    Tensor,
    Values,
    biases,
    family,
    layer_types,
    listed,
    number_or_whole,
    ropes_by_type,
    sliding,
    softcaps,
)
from jaxrl_llm.models.kinds import given, number, or_null

_TENSORS = (
    Tensor("pre_feedforward_layernorm.weight", ("mlp_norm",)),
    Tensor("post_attention_layernorm.weight", ("attention_post_norm",)),
)
_CAPS = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), or_null(number(least=0)))
MULTIMODAL: dict[str, Any] = {
    "prefixes": ("model.language_model.", "language_model.model.", "language_model."),
    "skipped": (
        *("vision_tower.", "multi_modal_projector.", "embed_vision.", "embed_audio.", "audio_tower."),
        *("model.vision_tower.", "model.multi_modal_projector.", "model.embed_vision.", "model.embed_audio."),
        "model.audio_tower.",
    ),
}  # fmt: skip


def _common(raw: Values, where: str) -> dict[str, Any]:
    return softcaps(raw) | biases(raw) | {
        "post_norms": True, "norm_offset": 1.0,
        "embedding_scale": float(raw["hidden_size"]) ** 0.5,
        "query_scale": float(raw.get("query_pre_attn_scalar", 256)) ** -0.5,
        "activation": raw.get("hidden_activation") or "gelu_pytorch_tanh",
        "tie_embeddings": given(raw, "tie_word_embeddings", True),
    }  # fmt: skip


def _gemma3(raw: Values, where: str) -> dict[str, Any]:
    return _common(raw, where) | {"qk_norm": True}


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "layer_types": layer_types(config), "attention_bias": config.attention_bias,
        "hidden_activation": config.activation, "query_pre_attn_scalar": number_or_whole(config.query_scale**-2),
        "attn_logit_softcapping": config.attention_softcap or None,
        "final_logit_softcapping": config.logit_softcap or None,
    }  # fmt: skip


def _write_gemma3(config: ModelConfig) -> dict[str, Any]:
    slides = sliding(config)
    return _write(config) | {
        "rope_parameters": ropes_by_type(config), "rope_local_base_freq": config.ropes[1].theta,
        "sliding_window_pattern": slides.index(False) + 1 if False in slides else config.num_layers + 1,
    }  # fmt: skip


def _gemma3_types(raw: Values, where: str) -> list[str]:
    pattern = given(raw, "sliding_window_pattern", given(raw, "_sliding_window_pattern", 6))
    return listed(raw, where, lambda layer: (layer + 1) % pattern != 0)


def _gemma3_thetas(raw: Values) -> dict[str, float]:
    return {
        FULL: float(given(raw, "rope_theta", 1_000_000.0)),
        SLIDING: float(given(raw, "rope_local_base_freq", 10_000.0)),
    }


GEMMA2 = family(
    "Gemma2ForCausalLM", "gemma2", read=_common, write=_write,
    types=partial(listed, otherwise=lambda layer: layer % 2 == 0), settings=_CAPS, tensors=_TENSORS,
    pad_token_id=0,
    max_position_embeddings=8192, num_key_value_heads=4, head_dim=256, sliding_window=4096, attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
)  # fmt: skip
GEMMA3 = family(
    "Gemma3ForCausalLM", "gemma3", read=_gemma3, write=_write_gemma3, types=_gemma3_types, thetas=_gemma3_thetas,
    pad_token_id=0,
    settings=_CAPS, tensors=_TENSORS, max_position_embeddings=131_072, num_key_value_heads=4, head_dim=256,
    rope_theta=1_000_000.0, sliding_window=4096, **MULTIMODAL,
)  # fmt: skip
