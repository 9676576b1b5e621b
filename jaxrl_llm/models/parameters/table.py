"""The weights of all model families in one table, and the models and kinds of layers that have each.

Names in Hugging Face's format are those of Llama; a family has its own where its files differ
(`families.Family.tensors`).
"""

from collections.abc import Callable
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


def _attends(config: ModelConfig) -> bool:
    return not config.carries


def _own_keys(config: ModelConfig) -> bool:
    return _attends(config) and not config.latent and not config.keys_of


def _attending(*fields: str) -> Callable[[ModelConfig], bool]:
    """The same as `_has`, of layers that attend."""
    return lambda config: _attends(config) and all(getattr(config, field) for field in fields)


def _dense(config: ModelConfig) -> bool:
    return not config.num_experts


_KEYS = _own_keys
_QK_NORM, _JOINT_NORM = _attending("qk_norm"), _attending("joint_qk_norm")
_POST_NORMS, _PRE_NORMS = _has("post_norms"), _has("pre_norms")
_EXPERTS, _SHARED, _LATENT, _DELTA, _CONVOLUTION = (
    _has(name) for name in ("num_experts", "shared_size", "latent", "delta", "convolution")
)

_ROWS = ("vocabulary", "hidden")


def _expert(name: str, axes: str, huggingface: str, gguf: str, bias: str) -> tuple[Weight, ...]:
    """A projection of every expert, and its bias."""
    of_experts = "mlp.experts.{expert}"
    return (
        _of_layer(name, f"experts {axes}", NORMAL, f"{of_experts}.{huggingface}.weight", f"{gguf}.{{expert}}.weight", 1,
                  when=_EXPERTS),
        _of_layer(f"{name}_bias", f"experts {bias}", ZEROS, f"{of_experts}.{huggingface}.bias",
                  f"{gguf}.{{expert}}.bias", when=_has("num_experts", "mlp_bias")),
    )  # fmt: skip


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
              lambda config: _attends(config) and not (config.latent and config.latent.query_rank)),
    _of_layer("key", "hidden kv_heads head_size", NORMAL, "self_attn.k_proj.weight", "attn_k.weight", 1, True, _KEYS),
    _of_layer("value", "hidden kv_heads head_size", NORMAL, "self_attn.v_proj.weight", "attn_v.weight", 1,
              when=lambda config: _own_keys(config) and not config.keys_as_values),
    _of_layer("out", "heads value_size hidden", NORMAL, "self_attn.o_proj.weight", "attn_output.weight", 2,
              when=_attends),
    _of_layer("mlp_norm", "hidden", IDENTITY, "post_attention_layernorm.weight", "ffn_norm.weight", when=_PRE_NORMS),
    _of_layer("query_bias", "heads head_size", ZEROS, "self_attn.q_proj.bias", "attn_q.bias", 0, True,
              _attending("attention_bias")),
    _of_layer("key_bias", "kv_heads head_size", ZEROS, "self_attn.k_proj.bias", "attn_k.bias", 0, True,
              _attending("attention_bias")),
    _of_layer("value_bias", "kv_heads head_size", ZEROS, "self_attn.v_proj.bias", "attn_v.bias",
              when=_attending("attention_bias")),
    _of_layer("out_bias", "hidden", ZEROS, "self_attn.o_proj.bias", "attn_output.bias", when=_attending("output_bias")),
    _of_layer("query_norm", "head_size", IDENTITY, "self_attn.q_norm.weight", "attn_q_norm.weight", 0, True, _QK_NORM),
    _of_layer("key_norm", "head_size", IDENTITY, "self_attn.k_norm.weight", "attn_k_norm.weight", 0, True,
              lambda config: config.qk_norm and _own_keys(config)),
    _of_layer("attention_post_norm", "hidden", IDENTITY, "post_attention_layernorm.weight",
              "post_attention_norm.weight", when=_POST_NORMS),
    _of_layer("mlp_post_norm", "hidden", IDENTITY, "post_feedforward_layernorm.weight", "post_ffw_norm.weight",
              when=_POST_NORMS),
    _linear("gate", "hidden inner", "mlp.gate_proj.weight", "ffn_gate.weight", 1, _dense),
    _of_layer("gate_bias", "inner", ZEROS, "mlp.gate_proj.bias", "ffn_gate.bias",
              when=lambda config: config.mlp_bias and _dense(config)),
    _linear("up", "hidden inner", "mlp.up_proj.weight", "ffn_up.weight", 1, _dense),
    _of_layer("up_bias", "inner", ZEROS, "mlp.up_proj.bias", "ffn_up.bias",
              when=lambda config: config.mlp_bias and _dense(config)),
    _linear("down", "inner hidden", "mlp.down_proj.weight", "ffn_down.weight", 1, _dense),
    _of_layer("down_bias", "hidden", ZEROS, "mlp.down_proj.bias", "ffn_down.bias",
              when=lambda config: config.mlp_bias and _dense(config)),
    _linear("router", "hidden experts", "mlp.gate.weight", "ffn_gate_inp.weight", 1, _EXPERTS),
    *_expert("gate", "hidden inner", "gate_proj", "ffn_gate", "inner"),
    *_expert("up", "hidden inner", "up_proj", "ffn_up", "inner"),
    *_expert("down", "inner hidden", "down_proj", "ffn_down", "hidden"),
    _of_layer("router_bias", "choices", ZEROS, "mlp.router.bias", "ffn_gate_inp.bias", when=_has("router_bias")),
    _of_layer("router_correction", "choices", ZEROS, "mlp.gate.e_score_correction_bias", "exp_probs_b.bias",
              when=_has("router_correction")),
    _of_layer("router_norm", "hidden", IDENTITY, "router.scale", "ffn_gate_inp.scale", when=_has("router_norm")),
    _of_layer("expert_scale", "choices", IDENTITY, "router.per_expert_scale", "ffn_down_exps.scale",
              when=_has("router_norm")),
    _linear("shared_gate", "hidden shared", "mlp.shared_experts.gate_proj.weight", "ffn_gate_shexp.weight", 1, _SHARED),
    _linear("shared_up", "hidden shared", "mlp.shared_experts.up_proj.weight", "ffn_up_shexp.weight", 1, _SHARED),
    _linear("shared_down", "shared hidden", "mlp.shared_experts.down_proj.weight", "ffn_down_shexp.weight", 1, _SHARED),
    _linear("shared_switch", "hidden one", "mlp.shared_expert_gate.weight", "ffn_gate_inp_shexp.weight", 1,
            _has("shared_gate")),
    _of_layer("experts_norm", "hidden", IDENTITY, "pre_feedforward_layernorm_2.weight", "pre_ffw_norm_2.weight",
              when=_has("shared_apart")),
    _of_layer("experts_post_norm", "hidden", IDENTITY, "post_feedforward_layernorm_2.weight", "post_ffw_norm_2.weight",
              when=_has("shared_apart")),
    _of_layer("shared_post_norm", "hidden", IDENTITY, "post_feedforward_layernorm_1.weight", "post_ffw_norm_1.weight",
              when=_has("shared_apart")),
    _of_layer("query_joint_norm", "heads head_size", IDENTITY, "self_attn.q_norm.weight", "attn_q_norm.weight", 0, True,
              _JOINT_NORM),
    _of_layer("key_joint_norm", "kv_heads head_size", IDENTITY, "self_attn.k_norm.weight", "attn_k_norm.weight", 0,
              True, _JOINT_NORM),
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
    _of_layer("delta_rate", "hidden state_heads", NORMAL, "linear_attn.in_proj_b.weight", "ssm_beta.weight", 1,
              when=_DELTA),
    _of_layer("delta_decay", "hidden state_heads", NORMAL, "linear_attn.in_proj_a.weight", "ssm_alpha.weight", 1,
              when=_DELTA),
    _of_layer("log_rate", "state_heads", ZEROS, "linear_attn.A_log", "ssm_a", when=_DELTA),
    _of_layer("decay_bias", "state_heads", ZEROS, "linear_attn.dt_bias", "ssm_dt.bias", when=_DELTA),
    _of_layer("delta_norm", "state_size", PLAIN, "linear_attn.norm.weight", "ssm_norm.weight", when=_DELTA),
    _of_layer("delta_out", "state_heads state_size hidden", NORMAL, "linear_attn.out_proj.weight", "ssm_out.weight", 2,
              when=_DELTA),
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
