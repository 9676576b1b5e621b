"""What the settings of a model's config.json may be, each for itself and all together."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.models import kinds
from jaxrl_llm.models.kinds import FLAG, SECTION, TEXT, check, either, list_of, number, one_of, or_null, whole
from jaxrl_llm.utils.errors import InputError

LAYER_TYPES = ("full_attention", "sliding_attention")
_HEADS, _POSITIVE, _NOT_NEGATIVE = whole(1, 2**16), number(above=0), number(least=0)
_FLAGS = (
    "tie_word_embeddings", "attention_bias", "mlp_bias", "use_bidirectional_attention", "use_sliding_window",
    "norm_topk_prob",
)  # fmt: skip
# In a JSON file null stands for what is left out.
SETTINGS = {
    "vocab_size": whole(1),
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), whole(1, 2**24)),
    "num_hidden_layers": whole(1, 10_000),
    "num_attention_heads": _HEADS,
    "num_key_value_heads": or_null(_HEADS),
    "head_dim": or_null(whole(2, 2**16)),
    "layer_types": or_null(list_of(one_of(*LAYER_TYPES, "linear_attention", "conv"))),
    **dict.fromkeys(_FLAGS, or_null(FLAG)),
    **dict.fromkeys(("hidden_act", "hidden_activation"), or_null(TEXT)),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "quantization_config"), or_null(SECTION)),
    **dict.fromkeys(("rms_norm_eps", "query_pre_attn_scalar"), _POSITIVE),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), or_null(_NOT_NEGATIVE)),
    **dict.fromkeys(("rope_theta", "rope_local_base_freq"), or_null(number(above=1))),
    "partial_rotary_factor": or_null(_POSITIVE),
    "max_position_embeddings": whole(0),
    **dict.fromkeys(("sliding_window", "max_window_layers"), or_null(whole(0))),
    **dict.fromkeys(("sliding_window_pattern", "_sliding_window_pattern"), or_null(whole(1))),
    **dict.fromkeys(("num_local_experts", "num_experts"), or_null(whole(0, 2**16))),
    "num_experts_per_tok": _HEADS,
    "decoder_sparse_step": whole(0),
    "mlp_only_layers": or_null(list_of(whole(0))),
    "eos_token_id": or_null(either(whole(0), list_of(whole(0))))._replace(
        words="a token's number, a list of them, or null"
    ),
    "bos_token_id": or_null(whole(0)),
}
REQUIRED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size", "intermediate_size")
# Of `rope_scaling`, and of `rope_parameters` or each of its sections.
ROPE_SETTINGS = {
    **dict.fromkeys(("rope_type", "type"), or_null(TEXT)),
    "rope_theta": or_null(number(above=1)),
    "original_max_position_embeddings": or_null(whole(1)),
    "truncate": FLAG,
    **dict.fromkeys(("factor", "low_freq_factor", "high_freq_factor"), _POSITIVE),
    **dict.fromkeys(("beta_fast", "beta_slow", "partial_rotary_factor"), or_null(_POSITIVE)),
    **dict.fromkeys(("attention_factor", "mscale", "mscale_all_dim", "llama_4_scaling_beta"), or_null(_NOT_NEGATIVE)),
    **dict.fromkeys(("factors", "short_factor", "long_factor"), list_of(_POSITIVE)),
}


def check_settings(raw: Any, where: str, more: Mapping[str, kinds.Kind]) -> None:
    """InputError for the first setting of a config.json that is missing, or of a wrong type or range.

    more: settings of its family.
    """
    for name in REQUIRED:
        if name not in raw:
            raise InputError(f"{where} lacks {name!r}")
    check(raw, {**SETTINGS, **more}, where)


def check_rope(scaling: dict[str, Any], where: str, section: str) -> None:
    """The same for one dictionary of rotary settings. section: what it is called in the file."""
    check(scaling, ROPE_SETTINGS, where, f"{section}.")
    kind = scaling.get("rope_type") or scaling.get("type")
    if kind in ("linear", "llama3", "yarn") and "factor" not in scaling:
        raise InputError(f"{where}: {section} of type {kind} lacks 'factor'")
    for name in ("short_factor", "long_factor"):
        if kind == "longrope" and name not in scaling:
            raise InputError(f"{where}: {section} of type longrope lacks '{name}'")


def check_together(config: Any, where: str) -> None:
    """InputError where settings of a `ModelConfig` do not fit each other."""
    c = config
    if c.num_heads % c.num_kv_heads:
        raise InputError(
            f"{where}: num_attention_heads {c.num_heads} is no multiple of num_key_value_heads {c.num_kv_heads}"
        )
    if c.head_dim % 2:
        raise InputError(f"{where}: head_dim {c.head_dim} is odd, but rotary embeddings turn pairs: it must be even")
    if c.num_experts and c.experts_per_token > c.num_experts:
        raise InputError(f"{where}: num_experts_per_tok {c.experts_per_token} exceeds the {c.num_experts} experts")
    for place, kind in enumerate(c.kinds):
        if not c.layers_of(place):
            names = " and ".join(each.name for each in c.kinds)
            raise InputError(
                f"{where}: layers of a {c.family} model are of the kinds {names}, but none of its {c.num_layers} is "
                f"{kind.name}: models without one are not supported"
            )
    for name, tokens in (("eos_token_id", c.eos_token_ids), ("bos_token_id", (c.bos_token_id,))):
        check_token_ids(tokens, c.vocab_size, where, name)
    for rope in c.ropes:
        if rope.kind in ("llama3", "yarn") and rope.original_length < 1:
            raise InputError(f"{where}: rope type {rope.kind} lacks 'original_max_position_embeddings'")
        if rope.kind == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
            raise InputError(
                f"{where}: high_freq_factor {rope.high_freq_factor:g} must be above low_freq_factor "
                f"{rope.low_freq_factor:g}"
            )
        pairs = int(c.head_dim * rope.fraction) // 2
        lists = {"factors": (rope.factors,), "longrope": (rope.short_factors, rope.long_factors)}.get(rope.kind, ())
        for count in map(len, lists):
            if count != pairs:
                raise InputError(f"{where}: {count} rotary factors for heads of {c.head_dim}, which need {pairs}")


def with_slots(config: Any, slots: int) -> Any:
    """A `ModelConfig` with so many sink slots in each key-value head (`layers.sink_slots`); 0 leaves it as it is.

    InputError for a model that has slots, or compressed keys and values (MLA).
    """
    kinds.require_kind("sink_slots", slots, whole(0, 1024))
    if slots == 0:
        return config
    if config.sink_slots:
        raise InputError(f"the model has sink slots already, {config.sink_slots} a head: leave out sink_slots")
    if any(kind.latent for kind in config.each_kind):
        raise InputError(
            "sink slots are keys and values of heads, but the model's keys and values are compressed (MLA): leave out "
            "sink_slots, or choose another model"
        )
    return dataclasses.replace(config, sink_slots=slots)


def check_token_ids(tokens: Any, vocab_size: int, where: str, name: str) -> None:
    """InputError for a token id (None is none) outside of the vocabulary."""
    for token in tokens:
        if token is not None and not 0 <= token < vocab_size:
            raise InputError(f"{where}: {name} {kinds.shown(token)} is not in the vocabulary of {vocab_size} tokens")
