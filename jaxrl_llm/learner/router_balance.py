"""Balanced experts: an auxiliary loss of a mixture's routers, and steps of their correction biases.

Of a layer with E experts, k of which take each of T tokens, let c_e be how many tokens expert e takes and P_e the mean
of its scores, each token's divided by their sum. The auxiliary loss is the mean over layers of

    E sum_e (c_e / T) P_e

(Fedus et al. 2021, arXiv 2101.03961, equation 4), about k where experts are chosen alike and up to E where not. Its
gradient goes through P. With one layer it is what transformers computes for Mixtral and Qwen3-MoE, whose c and P are
means over layers before the product; with sigmoids it is DeepSeek-V3's (2412.19437, section 2.1.2), over the batch
instead of a sequence. T counts the tokens of a minibatch that the model sees, prompts too, each once: tokens that rows
share, and that share a place in memory, are one, and a row's last token, from which nothing is drawn, is none.

c is of the whole minibatch, not of a micro-batch, so that the loss does not depend on how it is cut: with several
micro-batches one more forward pass counts it.

Correction biases b, by which DeepSeek-V3 and GLM-4.5 choose experts, have no gradient. Each step adds
speed sign(mean c - c_e) to them (2408.15664, algorithm 1).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.trajectory import PolicyOutputs
from jaxrl_llm.core.transform import Metrics
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.moe import Load
from jaxrl_llm.models.packed_states import LOAD
from jaxrl_llm.models.parameters import Params
from jaxrl_llm.utils.errors import InputError

BIAS = "router_correction"


class RouterBalance(NamedTuple):
    """How experts are kept busy; static."""

    coefficient: float = 0.0  # of the auxiliary loss
    bias_speed: float = 0.0  # of the correction biases' steps


def check_balance(balance: RouterBalance, config: ModelConfig, frozen: bool = False) -> None:
    """InputError for a model without what is to be balanced. frozen: the model's weights do not learn."""
    for name, value in (("router_aux_coefficient", balance.coefficient), ("router_bias_speed", balance.bias_speed)):
        if value and not config.num_experts:
            raise InputError(f"{name} is {value:g}, but the model is no mixture of experts: leave it out")
    if balance.bias_speed and not any(kind.router_correction for kind in config.each_kind):
        raise InputError(
            f"router_bias_speed is {balance.bias_speed:g}, but routers of {config.family} have no correction biases: "
            "take router_aux_coefficient"
        )
    if balance.bias_speed and frozen:
        raise InputError(
            f"router_bias_speed is {balance.bias_speed:g}, but with adapters the correction biases are frozen like all "
            "weights: leave it out"
        )


def without_load(outputs: PolicyOutputs) -> tuple[PolicyOutputs, Load | None]:
    """A policy's outputs, and the load of its experts where it is wanted."""
    extras = dict(outputs.extras or {})
    load = extras.pop(LOAD, None)
    return outputs.replace(extras=extras or None), load


def balanced(
    balance: RouterBalance, found: tuple[jax.Array, Metrics], load: Load, whole: Load | None, config: ModelConfig
) -> tuple[jax.Array, Metrics]:
    """The loss and metrics of some tokens with the auxiliary loss, and their load. whole: that of the minibatch."""
    value, metrics = found
    if balance.coefficient:
        unbalanced = balance_loss(load, load if whole is None else whole, config)
        value, metrics = value + balance.coefficient * unbalanced, {**metrics, "router/aux_loss": unbalanced}
    return value, {**metrics, LOAD: load}  # type: ignore[dict-item]  # summed over slices as numbers are


def balance_loss(load: Load, whole: Load, config: ModelConfig) -> jax.Array:
    """The auxiliary loss f32[] of some tokens, those of one slice, as their part of that of the whole minibatch."""
    tokens = jnp.maximum(jnp.sum(whole.chosen, axis=-1) / config.experts_per_token, 1)  # of each layer
    layers = sum(config.of_layer(number).num_experts > 0 for number in range(config.num_layers))
    products = jnp.sum(jax.lax.stop_gradient(whole.chosen) * load.probability, axis=-1) / tokens**2
    return config.num_experts * jnp.sum(products) / layers


def load_metrics(load: Load | None) -> Metrics:
    """The largest share of a layer's tokens' choices that one expert has, from 1 / E to 1 / k; none of no load."""
    if load is None:
        return {}
    total = jnp.maximum(jnp.sum(load.chosen, axis=-1, keepdims=True), 1)
    return {"router/largest_share": jnp.max(load.chosen / total)}


def with_bias_steps(params: Params, load: Load, config: ModelConfig, speed: float) -> Params:
    """The parameters, layers stacked or not, after a step of their correction biases."""
    steps = speed * jnp.sign(jnp.mean(load.chosen, axis=-1, keepdims=True) - load.chosen)

    def moved(layer: Params, numbers: int | np.ndarray) -> Params:
        if BIAS not in layer:
            return layer
        return {**layer, BIAS: (layer[BIAS] + steps[numbers]).astype(layer[BIAS].dtype)}

    layers = params["layers"]
    if isinstance(layers, tuple):
        return {**params, "layers": tuple(moved(layer, number) for number, layer in enumerate(layers))}
    if not config.kinds:
        return {**params, "layers": moved(layers, np.arange(config.num_layers))}
    of_kind = {kind.name: np.asarray(config.layers_of(number)) for number, kind in enumerate(config.kinds)}
    return {**params, "layers": {name: moved(layer, of_kind[name]) for name, layer in layers.items()}}
