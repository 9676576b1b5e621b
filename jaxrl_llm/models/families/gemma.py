"""Gemma 2, 3 and 4: the last with per-layer inputs and shared keys (E2B, E4B), or with experts beside the MLP."""

from functools import partial
from typing import Any

from jaxrl_llm.models.config import LayerKind, ModelConfig
from jaxrl_llm.models.families.family import (
    FULL,
    SLIDING,
    Tensor,
    Values,
    biases,
    family,
    layer_types,
    number_or_whole,
    ropes_by_type,
    sliding,
    softcaps,
    stacked_experts,
    types_of,
)
from jaxrl_llm.models.kinds import FLAG, SECTION, given, number, or_null, whole
from jaxrl_llm.utils.errors import InputError

_TENSORS = (
    Tensor("pre_feedforward_layernorm.weight", ("mlp_norm",)),
    Tensor("post_attention_layernorm.weight", ("attention_post_norm",)),
)
_CAPS = dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), or_null(number(least=0)))
_TOWERS = ("vision_tower.", "multi_modal_projector.", "embed_vision.", "embed_audio.", "audio_tower.")
MULTIMODAL: dict[str, Any] = {
    "prefixes": ("model.language_model.", "language_model.model.", "language_model."),
    "skipped": (*_TOWERS, *(f"model.{name}" for name in _TOWERS)),
}


def _common(raw: Values, where: str) -> dict[str, Any]:
    return softcaps(raw) | biases(raw) | {
        "post_norms": True, "norm_offset": 1.0,
        "embedding_scale": float(raw["hidden_size"]) ** 0.5,
        "query_scale": float(raw.get("query_pre_attn_scalar", 256)) ** -0.5,
        "activation": raw.get("hidden_activation") or "gelu_pytorch_tanh",
        "tie_embeddings": given(raw, "tie_word_embeddings", True),
    }  # fmt: skip


def _write(config: ModelConfig) -> dict[str, Any]:
    return {
        "layer_types": layer_types(config), "attention_bias": config.attention_bias,
        "hidden_activation": config.activation, "query_pre_attn_scalar": number_or_whole(config.query_scale**-2),
        "attn_logit_softcapping": config.attention_softcap or None,
        "final_logit_softcapping": config.logit_softcap or None,
    }  # fmt: skip


def _gemma3_types(raw: Values, where: str) -> list[str]:
    pattern = given(raw, "sliding_window_pattern", given(raw, "_sliding_window_pattern", 6))
    return types_of(raw, where, lambda layer: (layer + 1) % pattern != 0)


GEMMA2 = family(
    "Gemma2ForCausalLM", "gemma2", read=_common, write=_write,
    types=partial(types_of, otherwise=lambda layer: layer % 2 == 0), settings=_CAPS, tensors=_TENSORS, pad_token_id=0,
    max_position_embeddings=8192, num_key_value_heads=4, head_dim=256, sliding_window=4096, attn_logit_softcapping=50.0,
    final_logit_softcapping=30.0,
)  # fmt: skip
GEMMA3 = family(
    "Gemma3ForCausalLM", "gemma3", read=lambda raw, where: _common(raw, where) | {"qk_norm": True},
    write=lambda config: _write(config) | {
        "rope_parameters": ropes_by_type(config), "rope_local_base_freq": config.ropes[1].theta,
        "sliding_window_pattern": [*sliding(config), False].index(False) + 1,
    },
    types=_gemma3_types, thetas=lambda raw: {
        FULL: float(given(raw, "rope_theta", 1_000_000.0)),
        SLIDING: float(given(raw, "rope_local_base_freq", 10_000.0)),
    },
    pad_token_id=0, settings=_CAPS, tensors=_TENSORS, max_position_embeddings=131_072, num_key_value_heads=4,
    head_dim=256, rope_theta=1_000_000.0, sliding_window=4096, **MULTIMODAL,
)  # fmt: skip


NAMES = {FULL: "full", SLIDING: "sliding"}


def _gemma4_types(raw: Values, where: str) -> list[str]:
    return [*types_of(raw, where, lambda layer: (layer + 1) % 6 != 0)[:-1], FULL]  # as transformers has it


def _gemma4_sizes(raw: Values, types: list[str], where: str) -> dict[str, dict[str, Any]]:
    """Head size and key-value heads of layers with and without a window."""
    usual = {"head_dim": raw["head_dim"], "num_kv_heads": raw["num_key_value_heads"]}
    whole = dict(usual)
    if raw.get("per_layer_config") is None:
        whole["head_dim"] = given(raw, "global_head_dim", 512)
        if raw.get("attention_k_eq_v"):
            whole["num_kv_heads"] = given(raw, "num_global_key_value_heads", usual["num_kv_heads"])
        return {FULL: whole, SLIDING: usual}
    names = ("head_dim", "num_key_value_heads")
    found: dict[str, dict[str, Any]] = {}
    for layer, layer_type in enumerate(types):
        own = raw["per_layer_config"].get(str(layer)) or {}
        if not isinstance(own, dict) or set(own) - set(names):
            raise InputError(f"{where}: per_layer_config.{layer} may have head_dim and num_key_value_heads only")
        sizes = (own.get(of_file, usual[field]) for field, of_file in zip(usual, names, strict=True))
        one = dict(zip(usual, sizes, strict=True))
        if found.setdefault(layer_type, one) != one:
            raise InputError(f"{where}: per_layer_config gives layers of {layer_type} different sizes")
    return {FULL: usual, SLIDING: usual} | found


def _read_gemma4(raw: Values, where: str) -> dict[str, Any]:
    types = _gemma4_types(raw, where)
    sizes = _gemma4_sizes(raw, types, where)
    shared = int(raw.get("num_kv_shared_layers") or 0)
    bias = bool(raw.get("attention_bias"))
    wide = 2 if raw.get("use_double_wide_mlp") else 1
    first_shared = len(types) - shared
    if not 0 <= shared < len(types) or set(types[first_shared:]) - set(types[:first_shared]):
        raise InputError(f"{where}: num_kv_shared_layers is {shared}, but their keys must be those of earlier layers")
    kinds: list[LayerKind] = []
    of_layer: list[int] = []
    for layer, layer_type in enumerate(types):
        own = dict(sizes[layer_type])
        name = NAMES[layer_type]
        if raw.get("attention_k_eq_v") and layer_type == FULL:
            own["keys_as_values"] = True
        if layer >= first_shared:
            own |= {"keys_of": name, "intermediate_size": wide * raw["intermediate_size"]}
            own.pop("keys_as_values", None)
            name = f"shared_{name}"
        kind = LayerKind(name, tuple(sorted(own.items())))
        kinds += [kind] * (kind not in kinds)
        of_layer.append(kinds.index(kind))
    fields = softcaps(raw) | {
        "attention_bias": bias, "output_bias": bias, "post_norms": True, "qk_norm": True, "value_norm": True,
        "layer_scale": True, "embedding_scale": float(raw["hidden_size"]) ** 0.5, "query_scale": 1.0,
        "activation": raw.get("hidden_activation") or "gelu_pytorch_tanh",
        "layer_inputs": int(raw["hidden_size_per_layer_input"] or 0), "kinds": tuple(kinds),
        "kind_of_layer": tuple(of_layer),
    }  # fmt: skip
    if fields["layer_inputs"] and raw["vocab_size_per_layer_input"] != raw["vocab_size"]:
        raise InputError(f"{where}: vocab_size_per_layer_input differs from vocab_size, which is not supported")
    if raw.get("enable_moe_block"):
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            if not raw.get(name):
                raise InputError(f"{where} lacks {name!r}")
        fields |= {
            "num_experts": raw["num_experts"], "experts_per_token": raw["top_k_experts"], "router_norm": True,
            "intermediate_size": raw["moe_intermediate_size"], "shared_size": raw["intermediate_size"],
            "shared_apart": True, "normalise_router": True,
        }  # fmt: skip
    return fields


def _write_gemma4(config: ModelConfig) -> dict[str, Any]:
    types = layer_types(config)
    kinds = config.each_kind
    first = config.of_layer(types.index(SLIDING)) if SLIDING in types else kinds[0]
    shared = [kinds[kind].keys_of != "" for kind in config.kind_of_layer]
    width = config.shared_size or first.intermediate_size
    wide = any(kinds[k].intermediate_size != width for k, s in zip(config.kind_of_layer, shared, strict=True) if s)
    per_layer = {
        str(layer): {"head_dim": own.head_dim, "num_key_value_heads": own.num_kv_heads}
        for layer, own in enumerate(map(config.of_layer, range(config.num_layers)))
        if (own.head_dim, own.num_kv_heads) != (first.head_dim, first.num_kv_heads)
    }
    moe = config.num_experts or None
    return {
        "layer_types": types, "rope_parameters": ropes_by_type(config), "head_dim": first.head_dim,
        "num_key_value_heads": first.num_kv_heads, "per_layer_config": per_layer, "intermediate_size": width,
        "hidden_activation": config.activation, "attention_bias": config.attention_bias,
        "attention_k_eq_v": any(kind.keys_as_values for kind in kinds), "num_kv_shared_layers": sum(shared),
        "use_double_wide_mlp": wide, "hidden_size_per_layer_input": config.layer_inputs,
        "vocab_size_per_layer_input": config.vocab_size, "final_logit_softcapping": config.logit_softcap or None,
        "enable_moe_block": bool(moe), "num_experts": moe, "top_k_experts": config.experts_per_token or None,
        "moe_intermediate_size": config.intermediate_size if moe else None, "use_bidirectional_attention": None,
    }  # fmt: skip


GEMMA4 = family(
    "Gemma4ForCausalLM", read=_read_gemma4, write=_write_gemma4, types=_gemma4_types, pad_token_id=0,
    thetas=lambda raw: {FULL: 1_000_000.0, SLIDING: 10_000.0},
    settings={
        "per_layer_config": or_null(SECTION), "attention_k_eq_v": or_null(FLAG), "enable_moe_block": or_null(FLAG),
        "num_kv_shared_layers": or_null(whole(0)), "use_double_wide_mlp": or_null(FLAG),
        "hidden_size_per_layer_input": or_null(whole(0)), "vocab_size_per_layer_input": or_null(whole(1)),
        "top_k_experts": or_null(whole(1)), "moe_intermediate_size": or_null(whole(1)),
        "global_head_dim": or_null(whole(2)), "num_global_key_value_heads": or_null(whole(1)),
    },
    tensors=(
        Tensor("pre_feedforward_layernorm.weight", ("mlp_norm",)),
        Tensor("post_attention_layernorm.weight", ("attention_post_norm",)),
        Tensor("router.proj.weight", ("router",)),
        *stacked_experts("experts.gate_up_proj", "experts.down_proj"),
        *(Tensor(f"mlp.{name}_proj.weight", (f"shared_{name}",)) for name in ("gate", "up", "down")),
    ),
    max_position_embeddings=131_072, num_key_value_heads=4, head_dim=256, sliding_window=512, tie_word_embeddings=True,
    hidden_size_per_layer_input=256, vocab_size_per_layer_input=262_144,
    rope_parameters={
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
    }, unwritten=("rope_scaling", "rope_theta", "hidden_act"), **MULTIMODAL,
)  # fmt: skip
