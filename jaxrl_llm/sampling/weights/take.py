"""The sampler's layout of the weights, converted from the training layout once a rollout."""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.distributed import bytes_to_move, named_shardings, parameter_specs
from jaxrl_llm.distributed.aot import place
from jaxrl_llm.distributed.hosts import by_unit, of_this_host, own_copy, to_numpy
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.parameters import without_critic
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.quantised import kind_of
from jaxrl_llm.models.stacks import unstack
from jaxrl_llm.sampling.two_model_decode import paired_weights
from jaxrl_llm.sampling.weights.layouts import converter, loop_params, options_for, outside_layers, shardings
from jaxrl_llm.utils.errors import InputError


class Weights(NamedTuple):
    """Parameters for prefill and for the decode loop, which has a dict per layer so that no step copies weights."""

    prompts: Params
    loop: Params
    mesh: Mesh | None = None
    moved_bytes: int = 0  # bytes that devices did not hold before
    moved_seconds: float = 0.0  # time of the transfer
    device: jax.Device | None = None  # to which the parameters are committed, without a mesh

    @property
    def platform(self) -> str:
        """The platform of the devices: "cpu", "tpu" ..."""
        if self.mesh is not None:
            return str(self.mesh.devices.flat[0].platform)
        return jax.default_backend() if self.device is None else self.device.platform

    def spread(self, tree: Any) -> Any:
        """Place arrays, whose first axis is rows or prompt slots, on the mesh or the device of the parameters.

        Either all arguments of the loop are committed or none is, from the first call on: otherwise the second call
        would compile again.
        """
        if self.mesh is not None:
            return place(tree, shardings(tree, self.mesh))
        return tree if self.device is None else jax.device_put(tree, self.device)

    def zeros(self, make: Callable[..., Any], *args: Any) -> Any:
        """make(*args), a pytree of zeros, placed as `spread` does: on a mesh, no device ever has more than its part.

        args: hashable.
        """
        if self.mesh is None:
            return self.spread(_made(make, args))
        shapes = jax.eval_shape(partial(make, *args))
        places = shardings(shapes, self.mesh)
        return jax.tree.map(lambda x, place: jnp.zeros(x.shape, x.dtype, device=place), shapes, places)

    def fetched(self, tree: Any) -> Any:
        """Results of the programs, in a form that every host of the mesh can read."""
        return tree if self.mesh is None else to_numpy(tree, self.mesh)


@partial(jax.jit, static_argnums=(0, 1))
def _made(make: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """One program, where each shape would have its own."""
    return make(*args)


def take_weights(
    policy: Policy, params: Params, mesh: Mesh | None = None, weight_dtype: str | Any | None = None
) -> Weights:
    """Weights for the engine, in the dtype that the policy computes in.

    mesh: the devices to decode on, with axes of `models.mesh_axes`: rows over all but "tensor", which splits heads,
    hidden units of the MLP and vocabulary; experts over "expert". It may have other axes than the parameters' mesh, but
    the same devices in the same order (`sampling_mesh_of`). Without a mesh the parameters are used where they are.
    Parameters that are sharded over several hosts reach the devices that a host samples on (`of_this_host`): those of
    `mesh`, if it has devices of all these hosts, else their own; then all hosts must call this.
    weight_dtype: int8 or float8, to which the projections of layers are rounded (`models.quantised`): adapters are
    added to products with the rounded matrices, in full precision. By default the policy's own rounding, if any.
    A second policy, params["other"], is taken as well.
    Transfers are counted and timed. Raises InputError for a policy in float64, and for another weight_dtype.
    """
    rounding = kind_of(weight_dtype) or policy.rounding
    if policy.dtype == jnp.float64:
        raise InputError("tokens are not drawn in float64: sample with dataclasses.replace(policy, dtype=jnp.float32)")
    if (other := params.get("other")) is not None:
        own = {name: x for name, x in params.items() if name != "other"}
        first, second = (take_weights(policy, each, mesh, weight_dtype) for each in (own, other))
        return paired_weights(first, second)
    params = without_critic(params)
    if (spread := next((x for x in jax.tree.leaves(params) if not is_here(x)), None)) is not None:
        of_all = mesh is not None and set(mesh.devices.flat) == spread.sharding.device_set
        to = None if of_all or mesh is None else of_this_host(mesh)
        return _on_this_host(policy, params, mesh if of_all and mesh else spread.sharding.mesh, rounding, to)
    if mesh is None or mesh.size == 1:
        if rounding is None and is_ready(policy, params):
            views = _views(params, policy.config)
            return Weights(views, views)
        bound = [x for x in jax.tree.leaves(params) if _is_array(x) and x.committed]
        device = next(iter(bound[0].devices())) if bound else None
        if device is not None:
            spread = any(not mesh.empty and mesh.size > 1 for mesh in [jax.typeof(x).sharding.mesh for x in bound])
            # With the device alone, arrays from a larger mesh would keep its type.
            alone = NamedSharding(Mesh(np.array([device]), ("data",)), PartitionSpec())
            params = jax.device_put(params, alone if spread else device)
        loop = loop_params(policy, params, options_for(device, rounding=rounding))
        taken = Weights(loop, loop, device=device)
        return taken if rounding is not None or taken.platform == "cpu" else taken._replace(prompts=params)
    layout = named_shardings(parameter_specs(policy.config, mesh, isinstance(params["layers"], dict), params), mesh)
    moved, start = bytes_to_move(params, layout), time.perf_counter()
    bring = None
    devices = set(mesh.devices.flat)
    if not all(isinstance(x, jax.Array) and x.sharding.device_set == devices for x in jax.tree.leaves(params)):
        bring = partial(_brought, named_shardings(parameter_specs(policy.config, mesh, False, params), mesh))
    loop = jax.block_until_ready(converter(policy, params, mesh, rounding)(policy, params, bring))
    return Weights(loop, loop, mesh, moved, time.perf_counter() - start)


def _brought(places: Any, arrays: Params, number: int | None) -> Params:
    """Parameters that are on other devices, those of a layer or all but the layers', where they are to be."""
    own = outside_layers(places) if number is None else places["layers"][number]
    return jax.device_put(arrays, {name: own[name] for name in arrays})


def apart_from(weights: Weights, params: Params) -> Weights:
    """Weights that share no memory with the parameters, which may be donated while they are in use."""
    shared = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(params) if _has_pointer(x)}

    def apart(x: Any) -> Any:
        return jnp.copy(x) if _has_pointer(x) and x.unsafe_buffer_pointer() in shared else x

    loop = jax.tree.map(apart, weights.loop)
    prompts = loop if weights.prompts is weights.loop else jax.tree.map(apart, weights.prompts)
    return weights._replace(prompts=prompts, loop=loop)


def _has_pointer(x: Any) -> bool:
    return _is_array(x) and len(x.devices()) == 1


def is_here(x: Any) -> bool:
    """Whether all of x is on devices of this host."""
    return not _is_array(x) or x.is_fully_addressable


def _on_this_host(policy: Policy, params: Params, mesh: Mesh, rounding: str | None, to: Mesh | None) -> Weights:
    """`take_weights` of parameters on the devices of several hosts: one program gives each unit a copy of its own.

    to: other devices of this host, on which the weights are to be, each part once.
    """
    wide, start = by_unit(mesh), time.perf_counter()
    stacked = isinstance(params["layers"], dict)
    moved = bytes_to_move(params, named_shardings(parameter_specs(policy.config, wide, stacked, params), wide))
    own, further = of_this_host(mesh), 0

    def named_on(spec: PartitionSpec) -> NamedSharding:
        assert to is not None
        return NamedSharding(to, PartitionSpec(*(axis if axis in to.axis_names else None for axis in spec)))

    def finish(part: Any) -> Any:
        nonlocal further
        copy = own_copy(part, own)
        if to is None:
            return copy
        layouts = jax.tree.map(lambda x: named_on(x.sharding.spec), copy)
        further += bytes_to_move(copy, layouts)
        return jax.device_put(copy, layouts)

    loop = converter(policy, params, wide, rounding)(policy, params, finish=finish)
    return Weights(loop, loop, to or own, moved + further, time.perf_counter() - start)


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def is_ready(policy: Policy, params: Params) -> bool:
    """Whether the parameters are stacked, in float32 and on the one CPU, so that views of them suffice."""
    here = {jax.devices()[0]}
    return (
        jax.default_backend() == "cpu"
        and isinstance(params["layers"], dict)
        and "unembed_lora_out" not in params  # see `_others`
        and all(
            _is_array(x) and x.dtype == policy.dtype == jnp.float32 and x.devices() == here
            for x in jax.tree.leaves(params)
        )
    )


def _views(params: Params, config: ModelConfig) -> Params:
    """The parameters with a dict per layer, as views of their memory.

    The views keep the memory alive. While they exist, donating the parameters copies them instead of overwriting them.
    Prefill takes them too: XLA's CPU compiler makes one kernel of what all layers do, but one for each layer that is
    read off a stack.
    """
    return jax.tree.map(partial(jax.device_put, may_alias=True), unstack(jax.tree.map(np.from_dlpack, params), config))
