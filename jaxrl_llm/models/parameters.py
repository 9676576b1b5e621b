"""The weights of all model families in one table: logical axes, initialiser, and names in other formats.

Initialisation, loading and saving (`huggingface`, `gguf`), sharding (`placement`), LoRA, weight decay and checks of
parameters read it. A new weight is a row here and a line in the decoder.

Logical axes: layers, experts, hidden, heads (of queries), kv_heads, head_size, inner (of the MLP), vocabulary; of
adapters rank; of a critic's head units (hidden or its own) and values. `combine` joins parameters that are frozen with
those that learn. The module needs no JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jaxrl_llm.models.config import ModelConfig

Path = tuple[str, ...]
Shape = tuple[int, ...]
Params = dict[str, Any]  # a pytree of arrays
STACKED = ("layers", "experts")  # leading axes: other formats have a tensor for each index of them
NORMAL, IDENTITY, ZEROS = "normal", "identity", "zeros"  # initialisers; identity: of a norm, which multiplies by 1
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
    when: Callable[[ModelConfig], object] = lambda config: True  # the models that have it

    @property
    def path(self) -> Path:
        """Where it is in the parameters."""
        return ("layers", self.name) if "layers" in self.axes else (self.name,)

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


def _dense(config: ModelConfig) -> bool:
    return not config.num_experts


def _dense_bias(config: ModelConfig) -> bool:
    return config.mlp_bias and not config.num_experts


def _mixtral(config: ModelConfig) -> bool:
    return bool(config.num_experts) and config.family == "mixtral"


def _other_experts(config: ModelConfig) -> bool:
    return bool(config.num_experts) and config.family != "mixtral"


def _experts(section: str, gate: str, up: str, down: str, when: Callable[[ModelConfig], object]) -> tuple[Weight, ...]:
    """The rows of a mixture of experts, whose Hugging Face names differ between families."""
    each = f"{section}.experts.{{expert}}"
    return (
        _of_layer("router", "hidden experts", NORMAL, f"{section}.gate.weight", "ffn_gate_inp.weight", 1, when=when),
        _of_layer("gate", "experts hidden inner", NORMAL, f"{each}.{gate}.weight", "ffn_gate.{expert}.weight", 1,
                  when=when),
        _of_layer("up", "experts hidden inner", NORMAL, f"{each}.{up}.weight", "ffn_up.{expert}.weight", 1, when=when),
        _of_layer("down", "experts inner hidden", NORMAL, f"{each}.{down}.weight", "ffn_down.{expert}.weight", 1,
                  when=when),
    )  # fmt: skip


_QKV_BIAS, _OUT_BIAS = attrgetter("attention_bias"), attrgetter("output_bias")
_QK_NORM, _POST_NORMS = attrgetter("qk_norm"), attrgetter("post_norms")
_ROWS = ("vocabulary", "hidden")

# Random parameters are drawn with a key for each row's number among those that a model has: order is part of the seed.
TABLE = (
    Weight("embed", _ROWS, NORMAL, "model.embed_tokens.weight", "token_embd.weight"),
    Weight("final_norm", ("hidden",), IDENTITY, "model.norm.weight", "output_norm.weight"),
    Weight("unembed", _ROWS, NORMAL, "lm_head.weight", "output.weight", when=lambda config: not config.tie_embeddings),
    _of_layer("attention_norm", "hidden", IDENTITY, "input_layernorm.weight", "attn_norm.weight"),
    _of_layer("query", "hidden heads head_size", NORMAL, "self_attn.q_proj.weight", "attn_q.weight", 1, True),
    _of_layer("key", "hidden kv_heads head_size", NORMAL, "self_attn.k_proj.weight", "attn_k.weight", 1, True),
    _of_layer("value", "hidden kv_heads head_size", NORMAL, "self_attn.v_proj.weight", "attn_v.weight", 1),
    _of_layer("out", "heads head_size hidden", NORMAL, "self_attn.o_proj.weight", "attn_output.weight", 2),
    _of_layer("mlp_norm", "hidden", IDENTITY, "post_attention_layernorm.weight", "ffn_norm.weight",
              when=lambda config: not config.post_norms),
    _of_layer("mlp_norm", "hidden", IDENTITY, "pre_feedforward_layernorm.weight", "ffn_norm.weight", when=_POST_NORMS),
    _of_layer("query_bias", "heads head_size", ZEROS, "self_attn.q_proj.bias", "attn_q.bias", 0, True, _QKV_BIAS),
    _of_layer("key_bias", "kv_heads head_size", ZEROS, "self_attn.k_proj.bias", "attn_k.bias", 0, True, _QKV_BIAS),
    _of_layer("value_bias", "kv_heads head_size", ZEROS, "self_attn.v_proj.bias", "attn_v.bias", when=_QKV_BIAS),
    _of_layer("out_bias", "hidden", ZEROS, "self_attn.o_proj.bias", "attn_output.bias", when=_OUT_BIAS),
    _of_layer("query_norm", "head_size", IDENTITY, "self_attn.q_norm.weight", "attn_q_norm.weight", when=_QK_NORM),
    _of_layer("key_norm", "head_size", IDENTITY, "self_attn.k_norm.weight", "attn_k_norm.weight", when=_QK_NORM),
    _of_layer("attention_post_norm", "hidden", IDENTITY, "post_attention_layernorm.weight",
              "post_attention_norm.weight", when=_POST_NORMS),
    _of_layer("mlp_post_norm", "hidden", IDENTITY, "post_feedforward_layernorm.weight", "post_ffw_norm.weight",
              when=_POST_NORMS),
    _of_layer("gate", "hidden inner", NORMAL, "mlp.gate_proj.weight", "ffn_gate.weight", 1, when=_dense),
    _of_layer("gate_bias", "inner", ZEROS, "mlp.gate_proj.bias", "ffn_gate.bias", when=_dense_bias),
    _of_layer("up", "hidden inner", NORMAL, "mlp.up_proj.weight", "ffn_up.weight", 1, when=_dense),
    _of_layer("up_bias", "inner", ZEROS, "mlp.up_proj.bias", "ffn_up.bias", when=_dense_bias),
    _of_layer("down", "inner hidden", NORMAL, "mlp.down_proj.weight", "ffn_down.weight", 1, when=_dense),
    _of_layer("down_bias", "hidden", ZEROS, "mlp.down_proj.bias", "ffn_down.bias", when=_dense_bias),
    *_experts("block_sparse_moe", "w1", "w3", "w2", _mixtral),
    *_experts("mlp", "gate_proj", "up_proj", "down_proj", _other_experts),
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
    """The weights of a model by their paths in the parameters."""
    return {weight.path: weight for weight in TABLE if weight.when(config)}


def axis_sizes(config: ModelConfig) -> dict[str, int]:
    """The size of each logical axis of a policy."""
    return {
        "layers": config.num_layers, "experts": config.num_experts, "hidden": config.hidden_size,
        "heads": config.num_heads, "kv_heads": config.num_kv_heads, "head_size": config.head_dim,
        "inner": config.intermediate_size, "vocabulary": config.vocab_size,
    }  # fmt: skip


def shape_of(axes: Sequence[str], config: ModelConfig, **others: int) -> Shape:
    """The shape of an array with these logical axes; others: sizes of axes that are not the policy's, such as rank."""
    sizes = axis_sizes(config) | others
    return tuple(sizes[axis] for axis in axes)


def parameter_shapes(config: ModelConfig) -> dict[Path, Shape]:
    """Path -> shape of the parameter, layers stacked."""
    return {path: shape_of(weight.axes, config) for path, weight in weights(config).items()}


def head_weights(units: int) -> tuple[Weight, ...]:
    """The weights of a critic's head with an MLP of so many units; 0 is a linear head."""
    return (*HEAD_MLP, *HEAD) if units else HEAD


def head_shapes(config: ModelConfig, units: int, values: int) -> dict[str, Shape]:
    """Name -> shape of the weights of a critic's head that gives `values` values of a state."""
    width = units or config.hidden_size
    return {weight.name: shape_of(weight.axes, config, units=width, values=values) for weight in head_weights(units)}


def adapted_weights(config: ModelConfig) -> dict[str, Weight]:
    """The projections of a model that can have adapters, by name: all but those of experts."""
    own = weights(config).values()
    return {weight.name: weight for weight in own if weight.inputs and "experts" not in weight.axes}


def adapter_axes(weight: Weight) -> dict[str, tuple[str, ...]]:
    """Name -> axes of the two matrices of a projection's adapter, [inputs, rank] and [rank, outputs]."""
    start = len(weight.stacked)
    end = start + weight.inputs
    return {
        weight.name + LORA_IN: (*weight.axes[:end], "rank"),
        weight.name + LORA_OUT: (*weight.axes[:start], "rank", *weight.axes[end:]),
    }


ADAPTED = {weight.name: weight for weight in TABLE if weight.inputs and "experts" not in weight.axes}
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
    if "head_size" not in axes:
        return shape
    at = len(shape) - len(axes) + axes.index("head_size")
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
