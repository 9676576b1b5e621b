"""Members of a population (`core.population`): the parameters of a pass over their rows, and what their weights add.

N rows, r rank.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.by_row import ROWS, Members, inner_products
from jaxrl_llm.models.parameters import Params, adapted_by_default, adapted_weights
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.stacks import of_kind
from jaxrl_llm.utils.errors import InputError


def check_members(config: ModelConfig) -> None:
    """InputError for a model whose projections members of a population cannot perturb."""
    if any(kind.latent for kind in config.each_kind):
        raise InputError(
            "evolution perturbs projections of layers one by one, and attention to compressed keys and values (MLA) "
            "multiplies some of them with each other: choose another model"
        )
    if config.sink_slots:
        raise InputError("evolution perturbs projections alone, and sink slots would stay 0: leave out sink_slots")


def with_members(policy: Policy, params: Params, numbers: Array, seed: Array) -> Params:
    """The parameters of a pass over rows of members, int32[N], with noise of a seed, uint32[].

    InputError as of `check_members`, and for a policy without a population.
    """
    population, config, layers = policy.population, policy.config, params["layers"]
    if population is None:
        raise InputError("the policy has no population: give it one, dataclasses.replace(policy, population=...)")
    check_members(config)

    def of_layer(number: Any) -> Members:
        return Members(jnp.asarray(seed, jnp.uint32), jnp.int32(number), jnp.asarray(numbers, jnp.int32), population)

    if isinstance(layers, tuple):
        return {**params, "layers": tuple({**layer, ROWS: of_layer(i)} for i, layer in enumerate(layers))}
    kinds = [
        {**of_kind(layers, config, kind), ROWS: jax.vmap(of_layer)(_places(config, kind))}
        for kind in range(len(config.each_kind))
    ]
    names = [kind.name for kind in config.kinds]
    return {**params, "layers": dict(zip(names, kinds, strict=True)) if names else kinds[0]}


def perturbations(policy: Policy, params: Params, batch: Trajectories) -> Array:
    """f32[N]: of the member n of each row, the sum over matrices of <W, sign_n (sigma / sqrt(r)) B A^T>.

    It is linear in the parameters, and its gradient is the row's perturbation: what weighs rows by their fitness has
    the update of an evolution strategy as its gradient, and no token goes through the model. Noise is drawn a layer at
    a time, and again in the backward pass. batch: with info["member"] and info["member_seed"], f32[N]; NaN is member 0.
    InputError without them, and for a policy without a population.
    """
    population, config, layers = policy.population, policy.config, params["layers"]
    if population is None:
        raise InputError(
            "the perturbation of a row is of a member of a population, which the policy does not have: sample it with "
            "rollouts.hooked.evolved(ROLLOUT, Population(...))"
        )
    number, seed = (jnp.nan_to_num(batch.need(name)) for name in ("member", "member_seed"))
    seeds, numbers = seed.astype(jnp.uint32), number.astype(jnp.int32)
    perturbed = {weight.name: weight for weight in adapted_weights(config).values() if adapted_by_default(weight)}

    @jax.checkpoint
    def of_layer(layer: Params, place: Array) -> Array:
        own, found = Members(seeds, place, numbers, population), jnp.zeros(numbers.shape, jnp.float32)
        for name, w in sorted(layer.items()):
            inputs = math.prod(w.shape[: perturbed[name].inputs])
            found += inner_products(w.reshape(inputs, -1), own, name)
        return found

    def matrices(layer: Params) -> Params:
        return {name: w for name, w in layer.items() if name in perturbed}

    total = jnp.zeros(numbers.shape, jnp.float32)
    if isinstance(layers, tuple):
        return sum((of_layer(matrices(layer), jnp.int32(place)) for place, layer in enumerate(layers)), total)
    for kind in range(len(config.each_kind)):
        each = matrices(of_kind(layers, config, kind)), _places(config, kind)
        total, _ = jax.lax.scan(lambda sums, one: (sums + of_layer(*one), None), total, each)
    return total


def _places(config: ModelConfig, kind: int) -> Array:
    """The numbers of the layers of a kind, int32[n]."""
    return jnp.asarray(config.layers_of(kind) if config.kinds else range(config.num_layers), jnp.int32)
