"""`ModelConfig`: what one decoder must know to be Llama, Qwen2, Qwen3, Gemma 2, Gemma 3, Mixtral or Qwen3-MoE.

`from_hf` reads the dictionary of a Hugging Face config.json, both spellings of the rotary settings
(`rope_theta` with `rope_scaling`, and `rope_parameters`); `to_hf` writes one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxrl_llm.models.config_checks import check_settings, check_together
from jaxrl_llm.models.kinds import given, shown
from jaxrl_llm.models.rope import Rope, rope_to_hf, ropes_of
from jaxrl_llm.utils.errors import InputError


class Family(NamedTuple):
    """What two formats call a family of models, and what transformers takes for settings that a file leaves out."""

    architecture: str  # in Hugging Face's config.json
    gguf: str  # general.architecture
    defaults: Mapping[str, Any]


def _family(architecture: str, gguf: str, **defaults: Any) -> Family:
    usual = {"max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "sliding_window": 4096, "rope_theta": 10_000.0}
    return Family(architecture, gguf, MappingProxyType(usual | defaults))


# By Hugging Face's model_type. Mixtral is a Llama with experts in GGUF.
FAMILIES = {
    "llama": _family("LlamaForCausalLM", "llama", max_position_embeddings=2048),
    "qwen2": _family("Qwen2ForCausalLM", "qwen2", num_key_value_heads=32),
    "qwen3": _family("Qwen3ForCausalLM", "qwen3", num_key_value_heads=32, head_dim=128),
    "gemma2": _family(
        "Gemma2ForCausalLM", "gemma2", max_position_embeddings=8192, num_key_value_heads=4, head_dim=256,
        attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
    ),
    "gemma3_text": _family(
        "Gemma3ForCausalLM", "gemma3", max_position_embeddings=131_072, num_key_value_heads=4, head_dim=256,
        rope_theta=1_000_000.0,
    ),
    "mixtral": _family(
        "MixtralForCausalLM", "llama", max_position_embeddings=131_072, num_key_value_heads=8, rms_norm_eps=1e-5,
        sliding_window=None, num_experts_per_tok=2, rope_theta=1_000_000.0,
    ),
    "qwen3_moe": _family("Qwen3MoeForCausalLM", "qwen3moe", num_key_value_heads=4, num_experts_per_tok=8),
}  # fmt: skip
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")


@dataclass(frozen=True)
class ModelConfig:
    """A decoder as data. Hashable, so that it can be a static argument of `jit`."""

    family: str  # one of FAMILIES
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of one expert, where there are experts
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_epsilon: float
    tie_embeddings: bool
    activation: str = "silu"
    ropes: tuple[Rope, ...] = (Rope(),)
    rope_of_layer: tuple[int, ...] = ()  # index into ropes, one a layer
    window_of_layer: tuple[int, ...] = ()  # tokens that a layer sees including the current one; 0 sees all
    attention_bias: bool = False  # biases of query, key and value projections
    output_bias: bool = False  # bias of the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm of each query and key head
    post_norms: bool = False  # norms after attention and MLP too (Gemma)
    norm_offset: float = 0.0  # Gemma multiplies by 1 + weight
    final_norm: bool = True  # norm after the last layer
    embedding_scale: float = 1.0
    query_scale: float = 0.0  # of the attention logits
    attention_softcap: float = 0.0  # 0: none
    logit_softcap: float = 0.0  # 0: none
    num_experts: int = 0
    experts_per_token: int = 0
    normalise_router: bool = True  # the chosen experts' weights sum to one
    max_positions: int = 0  # context length, tokens
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    num_tokens: int = 0  # ids that the tokenizer has: those from here on are never drawn; 0: all have a token

    @property
    def known_tokens(self) -> int:
        """Ids that may be drawn: those below this."""
        return self.num_tokens or self.vocab_size

    @property
    def unpadded(self) -> int | None:
        """The ids that may be drawn, if there are others; else None."""
        return self.num_tokens if 0 < self.num_tokens < self.vocab_size else None


def _layer_types(raw: dict[str, Any], family: str, layers: int, where: str) -> list[str]:
    """'full_attention' or 'sliding_attention' for each layer, derived where an older file does not list them."""
    window, types = _window(raw, family), raw.get("layer_types")
    if types and len(types) != layers:
        raise InputError(f"{where}: layer_types names {len(types)} layers, but num_hidden_layers is {layers}")
    if family in ("llama", "mixtral", "qwen3_moe"):  # all layers slide or none does
        return ["sliding_attention" if window else "full_attention"] * layers
    if types:
        if "sliding_attention" in types and not window:
            raise InputError(
                f"{where}: layer_types names sliding_attention, but sliding_window is not given"
                + (" with use_sliding_window true" if family.startswith("qwen") else "")
            )
        return list(types)
    if not window:
        return ["full_attention"] * layers
    if family == "gemma2":
        slides = [layer % 2 == 0 for layer in range(layers)]
    elif family == "gemma3_text":
        pattern = given(raw, "sliding_window_pattern", given(raw, "_sliding_window_pattern", 6))
        slides = [(layer + 1) % pattern != 0 for layer in range(layers)]
    else:
        slides = [layer >= given(raw, "max_window_layers", 28) for layer in range(layers)]
    return ["sliding_attention" if s else "full_attention" for s in slides]


def _window(raw: dict[str, Any], family: str) -> int:
    if family == "llama" or (family.startswith("qwen") and not raw.get("use_sliding_window")):
        return 0
    return int(raw.get("sliding_window", FAMILIES[family].defaults["sliding_window"]) or 0)


def from_hf(raw: dict[str, Any], where: str = "the model's config.json") -> ModelConfig:
    """Read the dictionary of a config.json. where: the file's name, for messages.

    InputError, in one line, where the architecture or an option is not supported, or a setting is missing, of a wrong
    type, out of range, or does not fit the others.
    """
    if not isinstance(raw, dict):
        raise InputError(f"{where} is {shown(raw)}, but must be an object of settings")
    family = raw.get("model_type", "")
    if not isinstance(family, str) or family not in FAMILIES:
        named = raw.get("architectures") or "unknown"
        named = f"the architecture {shown(named[0] if isinstance(named, list) else named)}"
        named = f"the model type {shown(family)}" if isinstance(family, str) and family else named
        raise InputError(f"{where}: {named} is not supported; supported model types are {', '.join(FAMILIES)}")
    check_settings(raw, where)
    usual = FAMILIES[family].defaults
    layers, heads, hidden = raw["num_hidden_layers"], raw["num_attention_heads"], raw["hidden_size"]
    gemma, moe = family.startswith("gemma"), family in ("mixtral", "qwen3_moe")
    if family == "qwen3_moe":
        if raw.get("decoder_sparse_step", 1) != 1 or raw.get("mlp_only_layers"):
            raise InputError(
                f"{where}: Qwen3-MoE with some dense layers (mlp_only_layers, decoder_sparse_step) is not supported"
            )
        if "moe_intermediate_size" not in raw:
            raise InputError(f"{where} lacks 'moe_intermediate_size'")
    if raw.get("quantization_config"):
        how = raw["quantization_config"].get("quant_method", "unknown")
        raise InputError(f"{where}: weights that are quantised ({shown(how)}) are not read: give the original model")
    if raw.get("use_bidirectional_attention"):
        raise InputError(
            f"{where}: a model with use_bidirectional_attention is no causal language model, and is not supported"
        )
    activation = raw.get("hidden_activation" if gemma else "hidden_act") or ("gelu_pytorch_tanh" if gemma else "silu")
    if activation not in ACTIVATIONS:
        raise InputError(f"{where}: activation {activation!r} is not supported; supported are {', '.join(ACTIVATIONS)}")
    head_dim = raw.get("head_dim") or usual.get("head_dim", hidden // heads)
    if not raw.get("head_dim") and "head_dim" not in usual and hidden % heads:
        raise InputError(f"{where}: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    experts = int(raw.get("num_local_experts") or raw.get("num_experts") or 0) if moe else 0
    if moe and not experts:
        raise InputError(f"{where}: {family} needs num_local_experts or num_experts, at least 1")
    types = _layer_types(raw, family, layers, where)
    ropes, rope_of_layer = ropes_of({**usual, **raw}, family, types, where)
    bias = family == "qwen2" or (family != "mixtral" and bool(raw.get("attention_bias", False)))
    eos = raw.get("eos_token_id")
    window = _window(raw, family)
    config = ModelConfig(
        family=family,
        vocab_size=raw["vocab_size"],
        hidden_size=hidden,
        intermediate_size=raw["moe_intermediate_size" if family == "qwen3_moe" else "intermediate_size"],
        num_layers=layers,
        num_heads=heads,
        num_kv_heads={"num_key_value_heads": heads, **usual, **raw}["num_key_value_heads"] or heads,
        head_dim=head_dim,
        norm_epsilon=float(raw.get("rms_norm_eps", usual["rms_norm_eps"])),
        tie_embeddings=given(raw, "tie_word_embeddings", gemma),
        activation=activation,
        ropes=ropes,
        rope_of_layer=rope_of_layer,
        window_of_layer=tuple(window if t == "sliding_attention" else 0 for t in types),
        attention_bias=bias,
        output_bias=bias and family != "qwen2",
        mlp_bias=family == "llama" and bool(raw.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe", "gemma3_text"),
        post_norms=gemma,
        norm_offset=1.0 if gemma else 0.0,
        embedding_scale=float(hidden) ** 0.5 if gemma else 1.0,
        query_scale=float(raw.get("query_pre_attn_scalar", 256) if gemma else head_dim) ** -0.5,
        attention_softcap=_softcap("attn_logit_softcapping", raw, family),
        logit_softcap=_softcap("final_logit_softcapping", raw, family),
        num_experts=experts,
        experts_per_token=int({**usual, **raw}["num_experts_per_tok"]) if moe else 0,
        normalise_router=family == "mixtral" or (moe and bool(raw.get("norm_topk_prob", False))),
        max_positions=int({**usual, **raw}["max_position_embeddings"]),
        eos_token_ids=() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
        bos_token_id=raw.get("bos_token_id"),
    )
    check_together(config, where)
    return config


def _softcap(name: str, raw: Mapping[str, Any], family: str) -> float:
    return float({**FAMILIES[family].defaults, **raw}.get(name) or 0.0) if family.startswith("gemma") else 0.0


def to_hf(config: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """The dictionary of a config.json from which transformers builds the same model; `from_hf` reads it back equal.

    What versions of transformers and other readers spell in two ways is there in both, and nothing is left out that one
    of them would guess.
    """
    gemma, eos = config.family.startswith("gemma"), list(config.eos_token_ids)
    sliding = [w > 0 for w in config.window_of_layer]
    out: dict[str, Any] = {
        "architectures": [FAMILIES[config.family].architecture],
        "model_type": config.family,
        "dtype": dtype,
        "torch_dtype": dtype,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.norm_epsilon,
        "tie_word_embeddings": config.tie_embeddings,
        "max_position_embeddings": config.max_positions,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "hidden_act": config.activation,
        "sliding_window": max(config.window_of_layer) or None,
    }
    ropes = [rope_to_hf(rope) for rope in config.ropes]
    scaling = {name: value for name, value in ropes[0].items() if name != "rope_theta"}
    scaling["type"] = scaling["rope_type"]
    out |= {"rope_parameters": ropes[0], "rope_theta": ropes[0]["rope_theta"]}
    out["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    if gemma or config.family in ("qwen2", "qwen3"):
        out["layer_types"] = ["sliding_attention" if s else "full_attention" for s in sliding]
    if config.family.startswith("qwen"):
        first = sliding.index(True) if any(sliding) else config.num_layers
        out |= {"use_sliding_window": any(sliding), "max_window_layers": first}
    if config.family == "gemma3_text":
        out["rope_parameters"] = dict(zip(("full_attention", "sliding_attention"), ropes, strict=True))
        out["rope_local_base_freq"] = ropes[1]["rope_theta"]
        out["sliding_window_pattern"] = sliding.index(False) + 1 if False in sliding else config.num_layers + 1
    if config.family not in ("qwen2", "mixtral"):
        out["attention_bias"] = config.attention_bias
    if config.family == "llama":
        out["mlp_bias"] = config.mlp_bias
    if gemma:
        out["hidden_activation"] = config.activation
        out["query_pre_attn_scalar"] = _whole(config.query_scale**-2)
        out["attn_logit_softcapping"] = config.attention_softcap or None
        out["final_logit_softcapping"] = config.logit_softcap or None
    if config.num_experts:
        out["num_experts_per_tok"] = config.experts_per_token
        out["num_local_experts" if config.family == "mixtral" else "num_experts"] = config.num_experts
    if config.family == "qwen3_moe":
        out |= {"moe_intermediate_size": config.intermediate_size, "norm_topk_prob": config.normalise_router}
        out |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    return out


def _whole(x: float) -> float | int:
    return round(x) if abs(x - round(x)) < 1e-6 * max(1.0, abs(x)) else x
