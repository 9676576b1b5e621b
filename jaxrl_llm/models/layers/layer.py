"""One layer of a decoder: attention and an MLP or experts, each between its norms and added to the residual stream."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.attention import Attend, Weighing, gate_of, heads_of, norm, project_out
from jaxrl_llm.models.layers.latent import latent_heads, latent_values
from jaxrl_llm.models.layers.moe import expert_mlp, no_load, not_recorded
from jaxrl_llm.models.layers.parts import Rotations, rounded_once
from jaxrl_llm.models.layers.projections import project
from jaxrl_llm.models.layers.recurrent import convolution_mixer, delta_mixer
from jaxrl_llm.models.layers.sink_slots import slots_of
from jaxrl_llm.models.placement import ANYWHERE, Placement
from jaxrl_llm.models.quantised.layers import cast, straight_through_layer

Array = jax.Array
Layer = dict[str, Any]


class PassSettings(NamedTuple):
    """What all layers of a pass have in common."""

    config: ModelConfig  # of the model
    attend: Attend
    flow: Any  # `recurrent.Flow`, where some layers carry states
    placement: Placement
    dtype: Any
    rounding: str | None  # see `quantised.layers.quantised_layer`
    record: bool  # whether layers say which experts tokens went through
    absorbed: bool  # see `latent.latent_heads`
    counted: Array | None = None  # bool[N, L], the tokens of which layers say what they ask of experts


class LayerInputs(NamedTuple):
    """What one layer gets besides states and weights; None where there is none."""

    memory: Any  # its own, see `attention.Attend`
    experts: Array | None  # int[N, L, k], of each token, see `moe.expert_mlp`
    inputs: Array | None  # [N, L, inputs], of each token in this layer
    keys: Any = None  # (keys, values) of another layer, which it attends to


class Left(NamedTuple):
    """What one layer leaves besides states."""

    memory: Any
    routing: Any  # the experts of tokens, int[N, L, k], if they are recorded, or the `moe.Load` [E] if it is counted
    keys: Any  # (keys, values) [N, L, K, ...]


def run_layer(
    x: Array, layer: Layer, window: Any, rope: Any, rotations: Rotations, given: LayerInputs, config: ModelConfig,
    settings: PassSettings,
) -> tuple[Array, Left]:  # fmt: skip
    """States [N, L, D] after the layer. window: see `Weighing`; rope: which of the rotations; config: of the layer."""
    placement = settings.placement
    place = placement.states
    layer = straight_through_layer(placement.weights(cast(layer, settings.dtype)), settings.rounding)
    y = place(norm(x, layer["attention_norm"], config) if config.pre_norms else x, True)
    if config.carries:
        mixer = delta_mixer if config.delta else convolution_mixer
        y, memory = mixer(y, layer, config, settings.flow, given.memory, placement)
        keys: Any = None
    else:
        y, memory, keys = _attention(y, layer, window, rope, rotations, given, config, settings)
    x = place(_added(x, y, layer.get("attention_post_norm"), config), False)
    y = place(norm(x, layer["mlp_norm"], config) if config.pre_norms else x, True)
    y, routing = _mlp(x, y, layer, config, settings, given.experts)
    x = _added(x, y, layer.get("mlp_post_norm"), config)
    if given.inputs is not None:
        gate = rounded_once(activation(config))(project(x, layer["input_gate"], layer, "input_gate"))
        own = project(gate * given.inputs.astype(gate.dtype), layer["input_out"], layer, "input_out")
        x = x + norm(own, layer["input_post_norm"], config)
    if config.layer_scale:
        x = x * jax.lax.stop_gradient(layer["layer_scale"]).astype(x.dtype)
    return place(x, False), Left(memory, routing, keys)


def _attention(
    y: Array, layer: Layer, window: Any, rope: Any, rotations: Rotations, given: LayerInputs, config: ModelConfig,
    settings: PassSettings,
) -> tuple[Array, Any, tuple[Array, Array]]:  # fmt: skip
    """What attention makes of states y [N, L, D], the memory that it leaves, and its keys and values."""
    placement = settings.placement
    if config.latent:
        own = latent_heads(y, layer, config, rotations, rope, placement, settings.absorbed)
    else:
        own = heads_of(y, layer, config, rotations, rope, placement, given.keys)
    q, k, v = map(placement.heads, own)
    slots = slots_of(layer, k.shape[2])
    how = Weighing(window, config.query_scale, config.attention_softcap, layer.get("sinks"), slots)
    found, memory = settings.attend(q, k, v, given.memory, how)
    found = placement.tokens(found)
    if config.latent and settings.absorbed:
        found = latent_values(found, layer)
    if config.gated_attention:
        found = found * gate_of(y, layer, placement)
    return project_out(found, layer, placement), memory, (own.keys, own.values)


def _added(x: Array, y: Array, weight: Array | None, config: ModelConfig) -> Array:
    """The residual stream with what a part of the layer adds, after its norm."""
    y = y if weight is None else norm(y, weight, config)
    return x + (y if config.residual_scale == 1 else y * jnp.asarray(config.residual_scale, y.dtype))


@jax.named_scope("mlp")
def _mlp(
    x: Array, y: Array, layer: Layer, config: ModelConfig, settings: PassSettings, given: Array | None
) -> tuple[Array, Any]:
    """What the MLP, or experts, make of normed states y, and `Left.routing`. x: before the norm."""
    placement, record, counted = settings.placement, settings.record, settings.counted
    if not config.num_experts:
        none = not_recorded(given, x.shape[:2], settings.config) if record else None
        return mlp(y, layer, config, placement), none if counted is None else no_load(settings.config, x.dtype)
    states, routed = (norm(x, layer["experts_norm"], config), x) if config.shared_apart else (y, y)
    own = partial(gated, config=config)
    found = expert_mlp(states, layer, config, own, placement.routed, given, record, routed, counted)
    out, routing = found if record or counted is not None else (found, None)
    if config.shared_size:
        shared = mlp(y, layer, config, placement, "shared_")
        if config.shared_gate:
            shared = shared * jax.nn.sigmoid(project(y, layer["shared_switch"], layer, "shared_switch"))
        if config.shared_apart:
            out = norm(out, layer["experts_post_norm"], config)
            shared = norm(shared, layer["shared_post_norm"], config)
        out = out + shared
    return out, routing


def mlp(x: Array, layer: Layer, config: ModelConfig, placement: Placement = ANYWHERE, prefix: str = "") -> Array:
    """A gated MLP, [N, L, D] -> [N, L, D]. prefix: of the names of its weights."""
    gate, up, down = (f"{prefix}{name}" for name in ("gate", "up", "down"))

    def projected(x: Array, name: str) -> Array:
        out = project(x, layer[name], layer, name, name in placement.joined)
        bias = layer.get(f"{name}_bias") if config.mlp_bias else None
        return out if bias is None else out + bias

    rows = x.reshape(-1, x.shape[-1])  # as which the gradients of both projections add up: see `Placement.flat`

    def way(name: str) -> Array:
        return placement.units(projected(rows.reshape(x.shape), name))

    return projected(placement.units(gated(way(gate), way(up), config)), down)


def gated(gate: Array, up: Array, config: ModelConfig) -> Array:
    """The inner units of a gated MLP. With a limit (gpt-oss): (u + 1) g sigmoid(slope g), g <= limit, |u| <= limit."""
    return rounded_once(partial(_gated, config))(gate, up)


def _gated(config: ModelConfig, gate: Array, up: Array) -> Array:
    if not config.glu_limit:
        return activation(config)(gate) * up
    gate, up = jnp.minimum(gate, config.glu_limit), jnp.clip(up, -config.glu_limit, config.glu_limit)
    return (up + 1) * (gate * jax.nn.sigmoid(gate * config.glu_slope))


def activation(config: ModelConfig) -> Any:
    """The activation of gates."""
    if config.activation == "silu":
        return jax.nn.silu
    return lambda x: jax.nn.gelu(x, approximate=config.activation == "gelu_pytorch_tanh")
