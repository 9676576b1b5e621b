"""The weights of all model families in one table: logical axes, initialiser, and names in other formats.

Initialisation, loading and saving (`io.layout`, `gguf`), sharding (`placement`), LoRA, weight decay and checks of
parameters read it. A new weight is a row here and a line in the decoder. Names in Hugging Face's format are those of
Llama; a family has its own where its files differ (`families.Family.tensors`).

Logical axes: layers, experts, hidden, heads (of queries), kv_heads, head_size, inner (of the MLP), vocabulary; of
adapters rank; of a critic's head units (hidden or its own) and values. `combine` joins parameters that are frozen with
those that learn. The module needs no JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jaxrl_llm.models.config import ModelConfig

Path = tuple[str, ...]
Shape = tuple[int, ...]
Params = dict[str, Any]  # a pytree of arrays
STACKED = ("layers", "experts")  # leading axes: other formats have a tensor for each index of them
# Initialisers. Identity: of a norm, which multiplies by 1 with the offset that norms of the model have; plain: without.
NORMAL, IDENTITY, PLAIN, ZEROS = "normal", "identity", "plain", "zeros"
LORA_IN, LORA_OUT, LORA_SCALE = "_lora_in", "_lora_out", "lora_scale"


class Weight(NamedTuple):
    """One weight of a policy, of all layers and experts."""

    name: str  # in the parameters, or, with an axis of layers, in their entry "layers"
    axes: tuple[str, ...]
    initialiser: str
    huggingface: str  # {layer} and {expert} stand for their numbers
    gguf: str
    inputs: int = 0  # of a projection: how many axes, after those stacked, are its inputs; 0 for all others
    rotated: bool = False  # makes heads to which rotary embeddings are applied
    when: Callable[[ModelConfig], object] = lambda config: True  # the models, or kinds of layers, that have it
    kind: str = ""  # of the layers that have it, where a model has several kinds
    layers: tuple[int, ...] = ()  # their numbers, in the order of the axis of layers
    shape: Shape = ()  # in a model

    @property
    def path(self) -> Path:
        """Where it is in the parameters."""
        if "layers" not in self.axes:
            return (self.name,)
        return ("layers", self.kind, self.name) if self.kind else ("layers", self.name)

    @property
    def stacked(self) -> tuple[str, ...]:
        """The leading axes of layers and experts."""
        return tuple(takewhile(STACKED.__contains__, self.axes))


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
    Weight("unembed", _ROWS, NORMAL, "lm_head.weight", "output.weight", when=lambda config: not config.tie_embeddings),
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
)  # fmt: skip
# Of a critic's head (`critic`), which no other format has: values from units, and an MLP that gives these from states.
HEAD_MLP = (
    Weight("norm", ("hidden",), IDENTITY, "", ""),
    Weight("norm_bias", ("hidden",), ZEROS, "", ""),
    Weight("up", ("hidden", "units"), NORMAL, "", "", 1),
    Weight("up_bias", ("units",), ZEROS, "", ""),
)
HEAD = (
    Weight("weight", ("units", "values"), ZEROS, "", "", 1),
    Weight("bias", ("values",), ZEROS, "", ""),
)


def weights(config: ModelConfig) -> dict[Path, Weight]:
    """The weights of a model by their paths in the parameters, with their layers and shapes."""
    found = [
        weight._replace(shape=shape_of(weight.axes, config)) for weight in TABLE
        if "layers" not in weight.axes and weight.when(config)
    ]  # fmt: skip
    for number, kind in enumerate(config.each_kind):
        layers, name = config.layers_of(number), config.kinds[number].name if config.kinds else ""
        found += [
            weight._replace(kind=name, layers=layers, shape=shape_of(weight.axes, kind, layers=len(layers)))
            for weight in TABLE if "layers" in weight.axes and weight.when(kind)
        ]  # fmt: skip
    return {weight.path: weight for weight in found}


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """The size of each logical axis of a policy, or of one kind of layer."""
    latent, delta = config.latent, config.delta
    sizes = {
        "layers": config.num_layers, "experts": config.num_experts, "hidden": config.hidden_size,
        "heads": config.num_heads, "kv_heads": config.num_kv_heads, "head_size": config.head_dim,
        "value_size": latent.value if latent else config.head_dim, "inner": config.intermediate_size,
        "vocabulary": config.vocab_size, "choices": config.num_experts, "shared": config.shared_size, "one": 1,
        "inputs": config.layer_inputs,
        "all_inputs": config.layer_inputs * config.num_layers,
    }  # fmt: skip
    if delta:
        sizes |= {
            "query_heads": delta.keys, "query_size": delta.key, "state_heads": delta.values, "state_size": delta.value,
        }  # fmt: skip
    sizes |= {"taps": delta.taps if delta else config.convolution, "channels": config.hidden_size}
    if latent:
        sizes |= {"kv_rank": latent.rank, "latent": latent.rank + latent.rotated, "plain": latent.plain}
        sizes["query_rank"] = latent.query_rank
    return sizes


def shape_of(axes: Sequence[str], config: ModelConfig, **others: int) -> Shape:
    """The shape of an array with these logical axes; others: sizes of axes that are not the policy's, such as rank."""
    sizes = axis_sizes(config) | others
    return tuple(sizes[axis] for axis in axes)


def parameter_shapes(config: ModelConfig) -> dict[Path, Shape]:
    """Path -> shape of the parameter, layers stacked."""
    return {path: weight.shape for path, weight in weights(config).items()}


def put(tree: dict[str, Any], path: Path, value: Any) -> None:
    """Set the entry at a path in nested dictionaries."""
    *outer, last = path
    for name in outer:
        tree = tree.setdefault(name, {})
    tree[last] = value


def head_weights(units: int) -> tuple[Weight, ...]:
    """The weights of a critic's head with an MLP of so many units; 0 is a linear head."""
    return (*HEAD_MLP, *HEAD) if units else HEAD


def head_shapes(config: ModelConfig, units: int, values: int) -> dict[str, Shape]:
    """Name -> shape of the weights of a critic's head that gives `values` values of a state."""
    width = units or config.hidden_size
    return {weight.name: shape_of(weight.axes, config, units=width, values=values) for weight in head_weights(units)}


def adapted_weights(config: ModelConfig) -> dict[Path, Weight]:
    """The weights of a model that can have adapters, by path: projections of its layers and of their experts, and the
    matrices of embeddings, unless these are tied, so that an adapter of one could not be merged."""
    return {
        path: weight for path, weight in weights(config).items()
        if _is_adapted(weight) and ("layers" in weight.axes or not config.tie_embeddings)
    }  # fmt: skip


def _is_adapted(weight: Weight) -> bool:
    excluded = {"experts", "one", "taps"} & {*weight.axes[len(weight.stacked) :]}
    return weight.axes == _ROWS or (bool(weight.inputs) and "layers" in weight.axes and not excluded)


def adapted_by_default(weight: Weight) -> bool:
    """Whether a weight that can have an adapter has one where no targets are named: experts and embeddings have not."""
    return weight.stacked == ("layers",)


def adapter_axes(weight: Weight) -> dict[str, tuple[str, ...]]:
    """Name -> axes of the two matrices of a weight's adapter, [inputs, rank] and [rank, outputs].

    The inputs of an embedding are tokens; the outputs of the unembedding, whose rows are tokens, are.
    """
    axes = weight.axes[::-1] if weight.name == "unembed" else weight.axes
    start = len(weight.stacked)
    end = start + (weight.inputs or 1)
    return {
        weight.name + LORA_IN: (*axes[:end], "rank"),
        weight.name + LORA_OUT: (*axes[:start], "rank", *axes[end:]),
    }


ADAPTED = {weight.name: weight for weight in TABLE if _is_adapted(weight)}
# Of weights and adapters, layers stacked; where only some models have experts, with that axis.
AXES = {weight.name: weight.axes for weight in TABLE} | {LORA_SCALE: ("layers",)}
for _weight in ADAPTED.values():
    AXES |= adapter_axes(_weight)
PROJECTIONS = {weight.name: weight for weight in TABLE if weight.inputs}
NOT_DECAYED = frozenset(weight.name for weight in (*TABLE, *HEAD_MLP, *HEAD) if not weight.inputs)


def merge_heads(name: str, shape: Shape) -> Shape:
    """The shape of a projection of heads with the axes of heads and head size as one; of anything else as it is.

    >>> merge_heads("query", (2, 64, 4, 16)), merge_heads("out", (4, 16, 64)), merge_heads("up", (64, 128))
    ((2, 64, 64), (64, 64), (64, 128))
    """
    axes = PROJECTIONS[name].axes if name in PROJECTIONS else ()
    size = next((axis for axis in ("head_size", "value_size", "plain") if axis in axes), None)
    if size is None:
        return shape
    at = len(shape) - len(axes) + axes.index(size)
    return (*shape[: at - 1], shape[at - 1] * shape[at], *shape[at + 1 :])


def without_critic(params: Params) -> Params:
    """The policy's own parameters."""
    return {name: x for name, x in params.items() if name != "critic"}


def combine(frozen: Params | None, params: Params) -> Params:
    """The parameters of two parts: a deep union of dictionaries, and of tuples (of layers) entry by entry.

    The arrays are shared, not copied. frozen: None for none. Where both have an array, that of `params` is taken.
    """
    return params if frozen is None else _combine(frozen, params)


def _combine(a: Any, b: Any) -> Any:
    if isinstance(a, dict) and isinstance(b, dict):
        return {**a, **{name: _combine(a[name], x) if name in a else x for name, x in b.items()}}
    if isinstance(a, tuple) and isinstance(b, tuple):
        return tuple(_combine(x, y) for x, y in zip(a, b, strict=True))
    return b


def decayed(params: Any) -> Any:
    """Which parameters weight decay acts on: true for projections, false for embeddings, norms and biases."""
    import jax

    def decide(path: tuple[Any, ...], _: Any) -> bool:
        name = str(getattr(path[-1], "key", path[-1]))
        return name not in NOT_DECAYED

    return jax.tree_util.tree_map_with_path(decide, params)
