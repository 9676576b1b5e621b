"""LFM2: gated short convolutions, and some layers of attention."""

from typing import Any

from jaxrl_llm.models.config import LayerKind, ModelConfig
from jaxrl_llm.models.families.family import FULL, Tensor, Values, family, full
from jaxrl_llm.models.kinds import FLAG, given, list_of, number, or_null, whole
from jaxrl_llm.utils.errors import InputError

CONV = "conv"


def _inner(raw: Values) -> int:
    """Units of the MLP: published files give those of a plain one, of which a gated one has two thirds."""
    units = given(raw, "block_ff_dim", raw["intermediate_size"])
    if raw["block_auto_adjust_ff_dim"]:
        units, multiple = int(int(2 * units / 3) * raw["block_ffn_dim_multiplier"]), raw["block_multiple_of"]
        units = -(-units // multiple) * multiple
    return units


def _read(raw: Values, where: str) -> dict[str, Any]:
    layers, listed = range(raw["num_hidden_layers"]), raw.get("full_attn_idxs")
    types = raw.get("layer_types") or [FULL if listed is None or i in listed else CONV for i in layers]
    if set(types) - {FULL, CONV}:
        raise InputError(f"{where}: layer_types of lfm2 are {FULL} and {CONV}")
    if raw.get("conv_bias"):
        raise InputError(f"{where}: conv_bias of a lfm2 model is not supported")
    return {
        "qk_norm": True, "kinds": (LayerKind(CONV, (("convolution", raw["conv_L_cache"]),)), LayerKind("attention")),
        "kind_of_layer": tuple(int(each == FULL) for each in types), "intermediate_size": _inner(raw),
        "norm_epsilon": float(raw["norm_eps"]), "tie_embeddings": given(raw, "tie_word_embeddings", True),
    }  # fmt: skip


def _write(config: ModelConfig) -> dict[str, Any]:
    types = [FULL if kind else CONV for kind in config.kind_of_layer]
    return {
        "layer_types": types, "full_attn_idxs": [i for i, each in enumerate(types) if each == FULL],
        "conv_L_cache": config.each_kind[0].convolution, "conv_bias": False, "norm_eps": config.norm_epsilon,
        "block_auto_adjust_ff_dim": False, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256,
    }  # fmt: skip


LFM2 = family(
    "Lfm2ForCausalLM", read=_read, write=_write, types=full, max_position_embeddings=128_000, num_key_value_heads=8,
    pad_token_id=0, norm_eps=1e-5, rope_theta=1_000_000.0, conv_L_cache=3, block_auto_adjust_ff_dim=True,
    block_multiple_of=256, block_ffn_dim_multiplier=1.0,
    settings={
        "norm_eps": number(above=0), "conv_L_cache": whole(2, 64), "conv_bias": or_null(FLAG),
        "block_ff_dim": or_null(whole(1)), "block_auto_adjust_ff_dim": FLAG, "block_multiple_of": whole(1),
        "block_ffn_dim_multiplier": number(above=0), "full_attn_idxs": or_null(list_of(whole(0))),
    },
    tensors=(
        Tensor("model.embedding_norm.weight", ("final_norm",)),
        Tensor("operator_norm.weight", ("attention_norm",)), Tensor("ffn_norm.weight", ("mlp_norm",)),
        Tensor("self_attn.out_proj.weight", ("out",)), Tensor("self_attn.q_layernorm.weight", ("query_norm",)),
        Tensor("self_attn.k_layernorm.weight", ("key_norm",)),
        Tensor("conv.in_proj.weight", ("conv_in", "conv_gate", "conv_value")),
        *(Tensor(f"feed_forward.{stored}.weight", (name,)) for name, stored in (
            ("gate", "w1"), ("up", "w3"), ("down", "w2"))),
    ),
)  # fmt: skip
