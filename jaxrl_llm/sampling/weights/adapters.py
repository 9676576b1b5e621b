"""Weights of which only adapters change, or differ: of a new step, of several adapters, of a population's members."""

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_llm.distributed import bytes_to_move
from jaxrl_llm.distributed.hosts import to_numpy
from jaxrl_llm.models import lora
from jaxrl_llm.models.by_row import SEED
from jaxrl_llm.models.parameters import combine, without_critic
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.quantised.layers import cast
from jaxrl_llm.models.stacks import unstack
from jaxrl_llm.sampling.weights.layouts import adapter_loop_params, options_for
from jaxrl_llm.sampling.weights.take import Weights, is_here, is_ready, take_weights


def replace_adapters(policy: Policy, weights: Weights, params: Params) -> Weights | None:
    """The weights with the adapters (`models.lora`) of `params`, where nothing else differs: they alone are moved.

    None where that cannot be: parameters without adapters, those of the unembedding, which are in the loop's own, and
    a second policy. Where parameters are sharded over several hosts, all of them must call this.
    """
    adapters = adapters_alone(params)
    if adapters is None or "layers" not in weights.loop:
        return None
    start = time.perf_counter()
    of_layers = _cast_layers(policy, adapters)
    if (spread := next((x for x in jax.tree.leaves(of_layers) if not is_here(x)), None)) is not None:
        of_layers = to_numpy(of_layers, spread.sharding.mesh)
    old, moved = weights.loop["layers"], 0
    if weights.mesh is not None or weights.device is not None:
        kept = tuple({name: layer[name] for name in new} for new, layer in zip(of_layers, old, strict=True))
        places = jax.tree.map(lambda x: x.sharding, kept)
        moved = bytes_to_move(of_layers, places)
        of_layers = jax.device_put(of_layers, places)
    loop = combine(weights.loop, {"layers": jax.block_until_ready(of_layers)})
    prompts = loop
    if isinstance(weights.prompts["layers"], dict):  # stacked, on the one device where the parameters are
        prompts = combine(weights.prompts, jax.tree.map(jnp.copy, adapters))
    return weights._replace(prompts=prompts, loop=loop, moved_bytes=moved, moved_seconds=time.perf_counter() - start)


def adapters_alone(params: Params) -> Params | None:
    """The adapters, where nothing else of the parameters changes in updates of adapters; see `replace_adapters`."""
    base, adapters = lora.split(without_critic(params))
    return adapters if set(adapters) == {"layers"} and jax.tree.leaves(adapters) and "other" not in base else None


@partial(jax.jit, static_argnums=0)
def _cast_layers(policy: Policy, adapters: Params) -> tuple[Params, ...]:
    """Adapters by layer, in the dtype of the loop."""
    layers: tuple[Params, ...] = unstack(adapters, policy.config)["layers"]
    return tuple(cast(layer, policy.dtype) for layer in layers)


def with_adapters(policy: Policy, weights: Weights, params: Params) -> Weights:
    """Weights of one device with adapters, which share the memory of a model's own `weights`.

    params: the parameters that these were taken of, together with adapters (`parameters.combine`).
    """
    if policy.rounding is None and is_ready(policy, params):
        return take_weights(policy, params)  # views of the parameters
    params = weights.spread(without_critic(params))
    own = adapter_loop_params(policy, params, options_for(weights.device, rounding=policy.rounding))
    replaced = ("head", "unembed") if "head" in own else ()
    loop = combine({name: x for name, x in weights.loop.items() if name not in replaced}, own)
    taken = Weights(loop, loop, device=weights.device)
    return taken if policy.rounding is not None or taken.platform == "cpu" else taken._replace(prompts=params)


def of_members(weights: Weights, seed: Any) -> Weights:
    """The weights for a policy with a population, whose members have noise of this seed, uint32[].

    A request's `adapter` is then the number of a member; it must not be decoded with another policy.
    """
    seed = jnp.asarray(seed, jnp.uint32)
    if weights.mesh is not None:
        seed = jax.device_put(seed, NamedSharding(weights.mesh, PartitionSpec()))
    elif weights.device is not None:
        seed = jax.device_put(seed, weights.device)
    return weights._replace(prompts=weights.prompts | {SEED: seed}, loop=weights.loop | {SEED: seed})
