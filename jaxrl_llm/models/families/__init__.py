"""Families of models, by Hugging Face's `model_type`: from a config.json to a `ModelConfig`, and back.

A family, or some that are close, is a file here: its settings, and the names of its tensors where they are not Llama's.
"""

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models.config import ModelConfig, ScoreHead
from jaxrl_llm.models.config.checks import check_settings, check_together
from jaxrl_llm.models.config.rope import rope_to_hf, ropes_of
from jaxrl_llm.models.families import gemma, glm4, gpt_oss, lfm2, llama, qwen
from jaxrl_llm.models.families.family import FULL, NEUTRAL, SLIDING, Family, RecordingSettings, Tensor, quantisation_of
from jaxrl_llm.models.kinds import SECTION, TEXT, check, given, or_null, shown, whole
from jaxrl_llm.utils.errors import InputError

FAMILIES: Mapping[str, Family] = {
    "llama": llama.LLAMA,
    "mistral": llama.MISTRAL,
    "ministral3": llama.MINISTRAL3,
    "mixtral": llama.MIXTRAL,
    "smollm3": llama.SMOLLM3,
    "granite": llama.GRANITE,
    "phi3": llama.PHI3,
    "qwen2": qwen.QWEN2,
    "qwen2_moe": qwen.QWEN2_MOE,
    "qwen3": qwen.QWEN3,
    "qwen3_moe": qwen.QWEN3_MOE,
    "gemma2": gemma.GEMMA2,
    "gemma3_text": gemma.GEMMA3,
    "gemma4_text": gemma.GEMMA4,
    "olmo3": llama.OLMO3,
    "gpt_oss": gpt_oss.GPT_OSS,
    "glm4": glm4.GLM4,
    "glm4_moe": glm4.GLM4_MOE,
    "deepseek_v3": glm4.DEEPSEEK_V3,
    "qwen3_5_text": qwen.QWEN3_5,
    "qwen3_5_moe_text": qwen.QWEN3_5_MOE,
    "lfm2": lfm2.LFM2,
    "llada": llama.LLADA,
}
# Of models with towers for images or sound: where the language model's settings are, and its model type if not said.
WRAPPERS = {
    "gemma3": "gemma3_text",
    "gemma4": "gemma4_text",
    "mistral3": "mistral",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
_SCORES = {  # settings of models for sequence classification
    "id2label": or_null(SECTION), "num_labels": or_null(whole(1, 2**16)), "pad_token_id": or_null(whole(-1)),
    "step_separator": or_null(TEXT),
}  # fmt: skip
_LABELS = 2  # of a config.json that does not say, as transformers leaves its own default out
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")

__all__ = [
    "FAMILIES", "SLIDING", "Family", "Tensor", "from_hf", "language_model", "quantisation_of", "score_head", "to_hf",
    "unread_settings",
]  # fmt: skip


def language_model(raw: dict[str, Any]) -> dict[str, Any]:
    """The settings of the language model within those of a model with towers, by their common names; others as they
    are."""
    inner, name = raw.get("text_config"), raw.get("model_type")
    spelled = FAMILIES[name].spelled if isinstance(name, str) and name in FAMILIES else {}
    if any(own in raw for own in spelled.values()):
        common = {own: setting for setting, own in spelled.items()}
        return {common.get(setting, setting): value for setting, value in raw.items()}
    if not isinstance(name, str) or name not in WRAPPERS or not isinstance(inner, dict):
        return raw
    shared = {key: raw[key] for key in ("tie_word_embeddings", "eos_token_id", "quantization_config") if key in raw}
    return {"model_type": WRAPPERS[name], **shared, **inner}


def from_hf(raw: dict[str, Any], where: str = "the model's config.json") -> ModelConfig:
    """Read the dictionary of a config.json, both spellings of the rotary settings (`rope_theta` with `rope_scaling`,
    and `rope_parameters`). where: the file's name, for messages.

    InputError, in one line, where the architecture or an option is not supported, or a setting is missing, of a wrong
    type, out of range, or does not fit the others.
    """
    if not isinstance(raw, dict):
        raise InputError(f"{where} is {shown(raw)}, but must be an object of settings")
    raw = language_model(raw)
    name = raw.get("model_type", "")
    if not isinstance(name, str) or name not in FAMILIES:
        named = raw.get("architectures") or "unknown"
        named = f"the architecture {shown(named[0] if isinstance(named, list) else named)}"
        named = f"the model type {shown(name)}" if isinstance(name, str) and name else named
        raise InputError(f"{where}: {named} is not supported; supported model types are {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    check_settings(dict(raw), where, family.settings)
    quantisation_of(raw, where)
    if raw.get("use_bidirectional_attention"):
        raise InputError(
            f"{where}: a model with use_bidirectional_attention is no causal language model, and is not supported"
        )
    missing = {setting: value for setting, value in family.defaults.items() if setting not in raw}
    config = _config(name, family, raw | missing, where)
    check_together(config, where)
    return config


def score_head(raw: dict[str, Any], where: str = "the model's config.json") -> ScoreHead:
    """What the dictionary of a classifier's config.json says of its scores; `from_hf` reads all else."""
    raw = language_model(raw) | {name: raw[name] for name in _SCORES if name in raw}
    return read_score_head(raw, FAMILIES[raw["model_type"]], where)


def unread_settings(raw: dict[str, Any], where: str = "the model's config.json") -> tuple[str, ...]:
    """The settings that `from_hf` does not look at although they have a value, but for those that change no logits."""
    looked = RecordingSettings(language_model(raw))
    family = FAMILIES[from_hf(looked, where).family]
    return looked.unread(NEUTRAL.union(family.settings, family.defaults))


def _config(name: str, family: Family, values: dict[str, Any], where: str) -> ModelConfig:
    """The configuration by `values`: the settings of a file, and defaults for those that it leaves out."""
    layers, heads, hidden = values["num_hidden_layers"], values["num_attention_heads"], values["hidden_size"]
    listed = values.get("layer_types")
    if listed and len(listed) != layers:
        raise InputError(f"{where}: layer_types names {len(listed)} layers, but num_hidden_layers is {layers}")
    own = family.read(values, where)
    head_dim = own.get("head_dim") or values.get("head_dim") or family.defaults.get("head_dim")
    if not head_dim and hidden % heads:
        raise InputError(f"{where}: hidden_size {hidden} is no multiple of num_attention_heads {heads}")
    head_dim = head_dim or hidden // heads
    types = family.types(values, where)
    ropes, rope_of_layer = ropes_of(values, types, where, family.thetas and family.thetas(values))
    if not family.partial and any(rope.fraction != 1 and rope.kind != "proportional" for rope in ropes):
        part = "rotary embeddings of only a part of each head (partial_rotary_factor)"
        raise InputError(f"{where}: {part} are not supported in {name} models")
    window, eos = int(values.get("sliding_window") or 0), values.get("eos_token_id")
    fields: dict[str, Any] = {
        "vocab_size": values["vocab_size"], "hidden_size": hidden, "intermediate_size": values["intermediate_size"],
        "num_layers": layers, "num_heads": heads, "num_kv_heads": values.get("num_key_value_heads") or heads,
        "head_dim": head_dim, "norm_epsilon": float(values["rms_norm_eps"]),
        "tie_embeddings": given(values, "tie_word_embeddings", False), "activation": values.get("hidden_act") or "silu",
        "ropes": ropes, "rope_of_layer": rope_of_layer, "query_scale": float(head_dim) ** -0.5,
        "window_of_layer": tuple(window if each == SLIDING else 0 for each in types), "normalise_router": False,
        "max_positions": int(values["max_position_embeddings"]), "bos_token_id": values.get("bos_token_id"),
        "eos_token_ids": () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,),
    }  # fmt: skip
    fields |= {"ropes": fields["ropes"] + own.pop("more_ropes", ()), **own}
    if fields["activation"] not in ACTIVATIONS:
        raise InputError(
            f"{where}: activation {fields['activation']!r} is not supported; supported are {', '.join(ACTIVATIONS)}"
        )
    if "num_experts" in fields:
        if not fields["num_experts"]:
            raise InputError(f"{where}: {name} needs num_local_experts or num_experts, at least 1")
        fields.setdefault("experts_per_token", int(values.get("num_experts_per_tok", 0)))
    return ModelConfig(family=name, **fields)


def to_hf(config: ModelConfig, dtype: str = "float32") -> dict[str, Any]:
    """The dictionary of a config.json from which transformers builds the same model; `from_hf` reads it back equal,
    and `score_head` the scores of a classifier.

    What versions of transformers and other readers spell in two ways is there in both, and nothing is left out that one
    of them would guess.
    """
    if config.sink_slots:
        raise InputError(
            f"files of {config.family} have no place for sink slots: load the model from the run's own folder"
        )
    family, eos = FAMILIES[config.family], list(config.eos_token_ids)
    out: dict[str, Any] = {
        "architectures": [family.architecture],
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
        "pad_token_id": None,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "hidden_act": config.activation,
        "sliding_window": max(config.window_of_layer) or None,
    }
    if config.num_experts:
        out["num_experts_per_tok"] = config.experts_per_token
    own = family.write(config)
    rope = rope_to_hf(config.ropes[0]) if "rope_parameters" not in own else own["rope_parameters"]
    first = rope.get(FULL, rope)
    scaling = {setting: value for setting, value in first.items() if setting != "rope_theta"}
    scaling["type"] = scaling["rope_type"]
    out |= {"rope_parameters": rope, "rope_theta": first["rope_theta"]}
    out["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    if "partial_rotary_factor" in {**family.defaults, **rope}:
        out["partial_rotary_factor"] = rope["partial_rotary_factor"] = rope.get("partial_rotary_factor", 1.0)
    if "layer_types" in own and out["sliding_window"] is None:  # some readers want a number though no layer slides
        out["sliding_window"] = family.defaults.get("sliding_window")
    own |= write_score_head(config, family)
    found = {name: value for name, value in (out | own).items() if name not in family.unwritten}
    return {family.spelled.get(name, name): value for name, value in found.items()}


def read_score_head(raw: Mapping[str, Any], family: Family, where: str) -> ScoreHead:
    """The scores of a config.json: labels by `id2label`, or `num_labels` without names, the id of padding, and our own
    `step_separator` of a process reward model.

    InputError for labels whose numbers are not 0, 1 ..., and settings of other types.
    """
    check(raw, _SCORES, where)
    pad = raw["pad_token_id"] if "pad_token_id" in raw else family.defaults.get("pad_token_id")
    names = raw.get("id2label") or {str(n): f"LABEL_{n}" for n in range(given(raw, "num_labels", _LABELS))}
    if sorted(names) != sorted(map(str, range(len(names)))):
        raise InputError(f"{where}: id2label is {shown(names)}, but must number its labels from 0 on")
    labels = tuple(str(names[str(number)]) for number in range(len(names)))
    return ScoreHead(labels, pad, raw.get("step_separator"))


def write_score_head(config: ModelConfig, family: Family) -> dict[str, Any]:
    """The settings of a classifier from which `read_score_head` makes its scores again; {} of a language model."""
    if config.score is None:
        return {}
    text = "Text" * config.family.endswith("_text")  # of families that have models with towers too
    labels, separator = config.score.labels, config.score.step_separator
    return {
        "architectures": [family.architecture.replace("ForCausalLM", f"{text}ForSequenceClassification")],
        "id2label": {str(number): name for number, name in enumerate(labels)},
        "label2id": {name: number for number, name in enumerate(labels)},
        "pad_token_id": config.score.pad_token_id,
        **({} if separator is None else {"step_separator": separator}),
    }
