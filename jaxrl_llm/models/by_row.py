"""Parameters whose low-rank adapters differ from row to row of a batch: one engine, one forward pass for all of them.

Each row has a number. Either it says which of several LoRA adapters is the row's: `stacked` lays them side by side as
one adapter of all their ranks, and the factor of a row is 0 on the ranks of others. Or it is a member of a population
(`core.population`, `Policy.population`), whose matrices are drawn where they are used; params[SEED] has the seed of
their noise. `for_rows` gives the parameters of a pass over rows with these numbers.

n layers, N rows, K adapters, R ranks of all, r rank.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.models import parameters
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.projections import ROWS, Members, inner_products
from jaxrl_llm.models.parameters import LORA_FACTORS, LORA_IN, LORA_OUT, LORA_SCALE, Params
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.models.stacks import make_kinds, map_kinds, of_kind
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

    def with_members(kind: int) -> Params:
        numbers_of_layers = jnp.asarray(config.layers_of(kind), jnp.int32)
        return {**of_kind(layers, config, kind), ROWS: jax.vmap(of_layer)(numbers_of_layers)}

    return {**params, "layers": make_kinds(with_members, config)}


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
            "rollouts.programs.evolved(ROLLOUT, Population(...))"
        )
    number, seed = (jnp.nan_to_num(batch.need(name)) for name in ("member", "member_seed"))
    seeds, numbers = seed.astype(jnp.uint32), number.astype(jnp.int32)
    perturbed = {
        weight.name: weight
        for weight in parameters.adapted_weights(config).values()
        if parameters.adapted_by_default(weight)
    }

    @jax.checkpoint
    def of_layer(layer: Params, place: Array) -> Array:
        own, found = Members(seeds, place, numbers, population), jnp.zeros(numbers.shape, jnp.float32)
        for name, w in sorted(layer.items()):
            found += inner_products(w.reshape(math.prod(w.shape[: perturbed[name].inputs]), -1), own, name)
        return found

    def matrices(layer: Params) -> Params:
        return {name: w for name, w in layer.items() if name in perturbed}

    total = jnp.zeros(numbers.shape, jnp.float32)
    if isinstance(layers, tuple):
        return sum((of_layer(matrices(layer), jnp.int32(place)) for place, layer in enumerate(layers)), total)
    for kind in range(len(config.each_kind)):
        each = matrices(of_kind(layers, config, kind)), jnp.asarray(config.layers_of(kind), jnp.int32)
        total, _ = jax.lax.scan(lambda sums, one: (sums + of_layer(*one), None), total, each)
    return total


SEED = "member_seed"
MATRICES = (LORA_IN, LORA_OUT)
OF_EXPERTS = frozenset(name + half for name in ("gate", "up", "down") for half in MATRICES)


def are_by_row(policy: Policy, params: Params) -> bool:
    """Whether rows have adapters of their own with these parameters."""
    return policy.population is not None or any(LORA_FACTORS in layer for layer in _dictionaries(params))


def for_rows(policy: Policy, params: Params, numbers: Array | None) -> Params:
    """The parameters of a pass over rows with these numbers, int32[N]; those given where rows have no adapters.

    Of stacked adapters 0 is what the parameters had before, or nothing, and k is the k-th of the others.
    """
    if numbers is None or not are_by_row(policy, params):
        return params
    if policy.population is not None:
        return with_members(policy, params, numbers, params[SEED])

    def of_layer(layer: Params) -> Params:
        factors = layer[LORA_FACTORS]
        own = {name: x for name, x in layer.items() if name != LORA_FACTORS}
        return {**own, LORA_SCALE: jnp.take(factors, numbers, axis=factors.ndim - 2)}

    return {**params, "layers": map_kinds(of_layer, params["layers"])}


def can_stack(config: ModelConfig, several: Sequence[Params]) -> bool:
    """Whether the adapters of these parameters can be one: those of projections but for experts, embeddings, and
    attention to compressed keys and values."""
    if any(kind.latent for kind in config.each_kind):
        return False
    dictionaries = [layer for params in several for layer in _dictionaries(params)]
    return not any(name.endswith(MATRICES) for params in several for name in params) and not any(
        "router" in layer and OF_EXPERTS & set(layer) for layer in dictionaries
    )


def stacked(params: Params, others: Sequence[Params]) -> Params:
    """The parameters with the adapters of all side by side, and the factor of each on all ranks, f32[n, 1 + K, R].

    params: of the model, perhaps with adapters of its own; others: the same with other adapters, of any rank and
    targets, of which nothing else is read. They must be as `can_stack` says. Layers are stacked in all, or in none.
    """
    each = [params, *others]
    ranks = [max((x.shape[-1] for layer in _dictionaries(one) for name, x in layer.items() if name.endswith(LORA_IN)),
                 default=0) for one in each]  # fmt: skip
    own_ranks = np.repeat(np.arange(len(each)), ranks) == np.arange(len(each))[:, None]  # bool[1 + K, R]
    lead = 0 if isinstance(params["layers"], tuple) else 1  # axes of layers

    def joined(*layers: Params) -> Params:
        out = {name: x for name, x in layers[0].items() if not name.endswith(MATRICES) and name != LORA_SCALE}
        count = next(iter(out.values())).shape[:lead]
        for name in sorted({name for layer in layers for name in layer if name.endswith(MATRICES)}):
            axis = lead if name.endswith(LORA_OUT) else -1
            like = next(layer[name] for layer in layers if name in layer)
            parts = [_of_rank(layer.get(name), like, rank, axis) for layer, rank in zip(layers, ranks, strict=True)]
            out[name] = jnp.concatenate(parts, axis=axis)
        scales = [jnp.broadcast_to(jnp.asarray(layer.get(LORA_SCALE, 1.0)), count) for layer in layers]
        return {**out, LORA_FACTORS: jnp.stack(scales, axis=-1)[..., None] * jnp.asarray(own_ranks, jnp.float32)}

    return {**params, "layers": map_kinds(joined, *(one["layers"] for one in each))}


def _of_rank(x: Array | None, like: Array, rank: int, axis: int) -> Array:
    """A matrix of an adapter with as many ranks along an axis, the further ones 0; of zeros where there is none."""
    x = jnp.take(like, jnp.arange(0), axis=axis) if x is None else x
    missing = [(0, 0)] * x.ndim
    missing[axis] = (0, rank - x.shape[axis])
    return jnp.pad(x, missing)


def _dictionaries(params: Params) -> list[Any]:
    """The dictionaries of layers, one by one, or of each kind."""
    layers = params.get("layers", ())
    if isinstance(layers, tuple):
        return list(layers)
    return [entry for entry in layers.values() if isinstance(entry, dict)] or [layers]
