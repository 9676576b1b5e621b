"""The weights of all model families in one table, and the models and kinds of layers that have each.

Names in Hugging Face's format are those of Llama; a family has its own where its files differ
(`families.Family.tensors`).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.parameters.weight import IDENTITY, NORMAL, PLAIN, ZEROS, Weight


def _of_layer(
    name: str, axes: str, initialiser: str, huggingface: str, gguf: str, inputs: int = 0, rotated: bool = False,
    when: Callable[[ModelConfig], object] = lambda config: True,
) -> Weight:  # fmt: skip
    names = f"model.layers.{{layer}}.{huggingface}", f"blk.{{layer}}.{gguf}"
    return Weight(name, ("layers", *axes.split()), initialiser, *names, inputs, rotated, when)


def _has(*fields: str) -> Callable[[ModelConfig], bool]:
    """Whether all of some fields of a configuration are set."""
    return lambda config: all(getattr(config, field) for field in fields)


def _own_keys(config: ModelConfig) -> bool:
    return not config.carries and not config.latent and not config.keys_of


def _attending(*fields: str) -> Callable[[ModelConfig], bool]:
    """The same as `_has`, of layers that attend."""
    return lambda config: not config.carries and all(getattr(config, field) for field in fields)


def _dense(*fields: str) -> Callable[[ModelConfig], bool]:
    """The same as `_has`, of layers without experts."""
    return lambda config: not config.num_experts and all(getattr(config, field) for field in fields)


_QK_NORM, _POST_NORMS, _PRE_NORMS = _attending("qk_norm"), _has("post_norms"), _has("pre_norms")
_EXPERTS, _SHARED, _LATENT, _DELTA, _CONVOLUTION = (
    _has(name) for name in ("num_experts", "shared_size", "latent", "delta", "convolution")
)

_ROWS = ("vocabulary", "hidden")
_UNITS = ("gate", "hidden inner", "inner"), ("up", "hidden inner", "inner"), ("down", "inner hidden", "hidden")


def _projection(name: str, axes: str, bias: str, of_experts: bool = False) -> tuple[Weight, Weight]:
    """A projection of the MLP, or of every expert, and its bias."""
    lead, hf, gguf = ("experts ", "experts.{expert}.", ".{expert}") if of_experts else ("", "", "")
    when = partial(_has, "num_experts") if of_experts else _dense
    hf, gguf = f"mlp.{hf}{name}_proj", f"ffn_{name}{gguf}"
    weight = _of_layer(name, lead + axes, NORMAL, f"{hf}.weight", f"{gguf}.weight", 1, when=when())
    return weight, _of_layer(f"{name}_bias", lead + bias, ZEROS, f"{hf}.bias", f"{gguf}.bias", when=when("mlp_bias"))


def _linear(name: str, axes: str, huggingface: str, gguf: str, inputs: int, when: Any) -> Weight:
    return _of_layer(name, axes, NORMAL, huggingface, gguf, inputs, when=when)


# Random parameters are drawn with a key for each row's number among those that a model has: order is part of the seed.
TABLE = (
    Weight("embed", _ROWS, NORMAL, "model.embed_tokens.weight", "token_embd.weight"),
    Weight("final_norm", ("hidden",), IDENTITY, "model.norm.weight", "output_norm.weight"),
    Weight("unembed", _ROWS, NORMAL, "lm_head.weight", "output.weight",
           when=lambda config: not config.tie_embeddings and not config.score),
    _of_layer("attention_norm", "hidden", IDENTITY, "input_layernorm.weight", "attn_norm.weight", when=_PRE_NORMS),
    _of_layer("query", "hidden heads head_size", NORMAL, "self_attn.q_proj.weight", "attn_q.weight", 1, True,
              lambda config: not config.carries and not (config.latent and config.latent.query_rank)),
    _of_layer("key", "hidden kv_heads head_size", NORMAL, "self_attn.k_proj.weight", "attn_k.weight", 1, True,
              _own_keys),
    _of_layer("value", "hidden kv_heads head_size", NORMAL, "self_attn.v_proj.weight", "attn_v.weight", 1,
              when=lambda config: _own_keys(config) and not config.keys_as_values),
    _linear("out", "heads value_size hidden", "self_attn.o_proj.weight", "attn_output.weight", 2, _attending()),
    _of_layer("mlp_norm", "hidden", IDENTITY, "post_attention_layernorm.weight", "ffn_norm.weight", when=_PRE_NORMS),
    *(_of_layer(f"{name}_bias", f"{heads} head_size", ZEROS, f"self_attn.{name[0]}_proj.bias", f"attn_{name[0]}.bias",
                0, name != "value", _attending("attention_bias"))
      for name, heads in (("query", "heads"), ("key", "kv_heads"), ("value", "kv_heads"))),
    _of_layer("out_bias", "hidden", ZEROS, "self_attn.o_proj.bias", "attn_output.bias", when=_attending("output_bias")),
    _of_layer("query_norm", "head_size", IDENTITY, "self_attn.q_norm.weight", "attn_q_norm.weight", 0, True, _QK_NORM),
    _of_layer("key_norm", "head_size", IDENTITY, "self_attn.k_norm.weight", "attn_k_norm.weight", 0, True,
              lambda config: config.qk_norm and _own_keys(config)),
    _of_layer("attention_post_norm", "hidden", IDENTITY, "post_attention_layernorm.weight",
              "post_attention_norm.weight", when=_POST_NORMS),
    _of_layer("mlp_post_norm", "hidden", IDENTITY, "post_feedforward_layernorm.weight", "post_ffw_norm.weight",
              when=_POST_NORMS),
    *(weight for own in _UNITS for weight in _projection(*own)),
    _linear("router", "hidden experts", "mlp.gate.weight", "ffn_gate_inp.weight", 1, _EXPERTS),
    *(weight for own in _UNITS for weight in _projection(*own, of_experts=True)),
    _of_layer("router_bias", "choices", ZEROS, "mlp.router.bias", "ffn_gate_inp.bias", when=_has("router_bias")),
    _of_layer("router_correction", "choices", ZEROS, "mlp.gate.e_score_correction_bias", "exp_probs_b.bias",
              when=_has("router_correction")),
    _of_layer("router_norm", "hidden", IDENTITY, "router.scale", "ffn_gate_inp.scale", when=_has("router_norm")),
    _of_layer("expert_scale", "choices", IDENTITY, "router.per_expert_scale", "ffn_down_exps.scale",
              when=_has("router_norm")),
    *(_linear(f"shared_{name}", axes.replace("inner", "shared"), f"mlp.shared_experts.{name}_proj.weight",
              f"ffn_{name}_shexp.weight", 1, _SHARED) for name, axes, _ in _UNITS),
    _linear("shared_switch", "hidden one", "mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight", 1,
            _has("shared_gate")),
    *(_of_layer(f"{name}_norm", "hidden", IDENTITY, f"{place}_feedforward_layernorm_{number}.weight",
                f"{place}_ffw_norm_{number}.weight", when=_has("shared_apart"))
      for name, place, number in (("experts", "pre", 2), ("experts_post", "post", 2), ("shared_post", "post", 1))),
    *(_of_layer(f"{name}_joint_norm", f"{heads} head_size", IDENTITY, f"self_attn.{name[0]}_norm.weight",
                f"attn_{name[0]}_norm.weight", 0, True, _attending("joint_qk_norm"))
      for name, heads in (("query", "heads"), ("key", "kv_heads"))),
    _of_layer("sinks", "heads", ZEROS, "self_attn.sinks", "attn_sinks.weight", when=_attending("attention_sinks")),
    # No published format has them.
    _of_layer("sink_keys", "kv_heads slots head_size", ZEROS, "", "", when=_attending("sink_slots")),
    _of_layer("sink_values", "kv_heads slots head_size", ZEROS, "", "", when=_attending("sink_slots")),
    _of_layer("layer_scale", "", IDENTITY, "layer_scalar", "layer_output_scale.weight", when=_has("layer_scale")),
    _linear("query_in", "hidden query_rank", "self_attn.q_a_proj.weight", "attn_q_a.weight", 1,
            lambda config: config.latent and config.latent.query_rank),
    _of_layer("query_in_norm", "query_rank", IDENTITY, "self_attn.q_a_layernorm.weight", "attn_q_a_norm.weight",
              when=lambda config: config.latent and config.latent.query_rank),
    _of_layer("query_out", "query_rank heads head_size", NORMAL, "self_attn.q_b_proj.weight", "attn_q_b.weight", 1,
              True, lambda config: config.latent and config.latent.query_rank),
    _of_layer("latent", "hidden latent", NORMAL, "self_attn.kv_a_proj_with_mqa.weight", "attn_kv_a_mqa.weight", 1,
              True, _LATENT),
    _of_layer("latent_norm", "kv_rank", IDENTITY, "self_attn.kv_a_layernorm.weight", "attn_kv_a_norm.weight",
              when=_LATENT),
    _linear("key_out", "kv_rank heads plain", "self_attn.kv_b_proj.weight", "attn_k_b.weight", 1, _LATENT),
    _linear("value_out", "kv_rank heads value_size", "self_attn.kv_b_proj.weight", "attn_v_b.weight", 1, _LATENT),
    _of_layer("query_gate", "hidden heads head_size", NORMAL, "self_attn.q_proj.weight", "attn_q_gate.weight", 1,
              when=_attending("gated_attention")),
    *(_of_layer(f"delta_{name}", f"hidden {heads}_heads {heads}_size", NORMAL, f"linear_attn.in_proj_{name}.weight",
                f"ssm_{name}.weight", 1, when=_DELTA)
      for name, heads in (("query", "query"), ("key", "query"), ("value", "state"), ("gate", "state"))),
    *(_of_layer(f"{name}_taps", f"taps {heads}_heads {heads}_size", NORMAL, f"linear_attn.conv1d_{name}.weight",
                f"ssm_conv1d_{name}.weight", 1, when=_DELTA)
      for name, heads in (("query", "query"), ("key", "query"), ("value", "state"))),
    _linear("delta_rate", "hidden state_heads", "linear_attn.in_proj_b.weight", "ssm_beta.weight", 1, _DELTA),
    _linear("delta_decay", "hidden state_heads", "linear_attn.in_proj_a.weight", "ssm_alpha.weight", 1, _DELTA),
    _of_layer("log_rate", "state_heads", ZEROS, "linear_attn.A_log", "ssm_a", when=_DELTA),
    _of_layer("decay_bias", "state_heads", ZEROS, "linear_attn.dt_bias", "ssm_dt.bias", when=_DELTA),
    _of_layer("delta_norm", "state_size", PLAIN, "linear_attn.norm.weight", "ssm_norm.weight", when=_DELTA),
    _linear("delta_out", "state_heads state_size hidden", "linear_attn.out_proj.weight", "ssm_out.weight", 2, _DELTA),
    *(_linear(name, "hidden channels", f"conv.{name}.weight", f"{name}.weight", 1, _CONVOLUTION)
      for name in ("conv_in", "conv_gate", "conv_value")),
    _linear("conv_taps", "taps channels", "conv.conv.weight", "shortconv.conv.weight", 1, _CONVOLUTION),
    _linear("conv_out", "channels hidden", "conv.out_proj.weight", "shortconv.out_proj.weight", 1, _CONVOLUTION),
    Weight("embed_inputs", ("vocabulary", "all_inputs"), NORMAL, "model.embed_tokens_per_layer.weight",
           "per_layer_token_embd.weight", when=_has("layer_inputs")),
    Weight("project_inputs", ("hidden", "all_inputs"), NORMAL, "model.per_layer_model_projection.weight",
           "per_layer_model_proj.weight", 1, when=_has("layer_inputs")),
    Weight("inputs_norm", ("inputs",), IDENTITY, "model.per_layer_projection_norm.weight",
           "per_layer_proj_norm.weight", when=_has("layer_inputs")),
    _linear("input_gate", "hidden inputs", "per_layer_input_gate.weight", "inp_gate.weight", 1, _has("layer_inputs")),
    _linear("input_out", "inputs hidden", "per_layer_projection.weight", "proj.weight", 1, _has("layer_inputs")),
    _of_layer("input_post_norm", "hidden", IDENTITY, "post_per_layer_input_norm.weight", "post_norm.weight",
              when=_has("layer_inputs")),
    Weight("score", ("hidden", "labels"), NORMAL, "score.weight", "", 1, when=_has("score")),
)  # fmt: skip

# Of a critic's head (`critic`), which no other format has: values from units, and an MLP that gives these from states.
HEAD_MLP = (
    Weight("norm", ("hidden",), IDENTITY, "", ""),
    Weight("norm_bias", ("hidden",), ZEROS, "", ""),
    Weight("up", ("hidden", "units"), NORMAL, "", "", 1),
    Weight("up_bias", ("units",), ZEROS, "", ""),
)

HEAD = (Weight("weight", ("units", "values"), ZEROS, "", "", 1), Weight("bias", ("values",), ZEROS, "", ""))
