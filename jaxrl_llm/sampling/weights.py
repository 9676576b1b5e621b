"""The sampler's layout of the weights, converted from the training layout once a rollout."""

from __future__ import annotations

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
from jaxrl_llm.distributed.on_hosts import by_unit, of_this_host, own_copy, to_numpy
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.layers.recurrent import State
from jaxrl_llm.models.placement import SAMPLED_ROWS, AnyMesh, row_axes, split_spec
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.quantised import cast, is_rounded, kind_of, quantised_layer, quantised_specs
from jaxrl_llm.models.stacks import of_kind, place_of, unstack
from jaxrl_llm.sampling.decode import RingCache
from jaxrl_llm.sampling.kv_cache import LayerCache, PrefixCache
from jaxrl_llm.sampling.speculative.verify import Tail
from jaxrl_llm.sampling.weight_layouts import PLAIN, LoopOptions, options_for, with_inputs_last
from jaxrl_llm.utils.errors import InputError


class Weights(NamedTuple):
    """Parameters for prefill and for the decode loop, which has a dict per layer so that no step copies weights."""

    prompts: Params
    loop: Params
    mesh: Mesh | None = None
    moved_bytes: int = 0  # bytes that devices did not hold before
    moved_seconds: float = 0.0  # time of the transfer
    device: jax.Device | None = None  # to which the parameters are committed, without a mesh

    def spread(self, tree: Any) -> Any:
        """Place arrays, whose first axis is rows or prompt slots, on the mesh or the device of the parameters.

        Either all arguments of the loop are committed or none is, from the first call on: otherwise the second call
        would compile again.
        """
        if self.mesh is not None:
            return place(tree, shardings(tree, self.mesh))
        return tree if self.device is None else jax.device_put(tree, self.device)

    def zeros(self, make: Callable[[], Any]) -> Any:
        """make(), a pytree of zeros, placed as `spread` does: on a mesh, no device ever has more than its part."""
        if self.mesh is None:
            return self.spread(make())
        shapes = jax.eval_shape(make)
        put = lambda x, where: jnp.zeros(x.shape, x.dtype, device=where)  # noqa: E731
        return jax.tree.map(put, shapes, shardings(shapes, self.mesh))

    def fetched(self, tree: Any) -> Any:
        """Results of the programs, in a form that every host of the mesh can read."""
        return tree if self.mesh is None else to_numpy(tree, self.mesh)

    def beside(self, second: Weights) -> Weights:
        """These weights, and those of a second policy that is run with the first (`pairs`)."""
        return self._replace(
            prompts=self.prompts | {"other": second.prompts},
            loop=self.loop | {"other": second.loop},
            moved_bytes=self.moved_bytes + second.moved_bytes,
            moved_seconds=self.moved_seconds + second.moved_seconds,
        )

    def alone(self) -> Weights:
        """These weights without those of a second policy."""
        prompts, loop = ({name: x for name, x in tree.items() if name != "other"} for tree in (self.prompts, self.loop))
        return self._replace(prompts=prompts, loop=loop)


def take_weights(
    policy: Policy, params: Params, mesh: Mesh | None = None, weight_dtype: str | Any | None = None
) -> Weights:
    """Weights for the engine, in the dtype that the policy computes in.

    mesh: the devices to decode on, with axes of `models.placement`: rows over all but "tensor", which splits heads,
    hidden units of the MLP and vocabulary; experts over "expert". It may have other axes than the parameters' mesh, but
    the same devices in the same order (`sampling_mesh_of`). Without a mesh the parameters are used where they are.
    Parameters that are sharded over several hosts reach the devices that each host samples on (`on_hosts`), by `mesh`
    if that is of all these hosts, else by their own; then all hosts must call this.
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
        return first.beside(second)
    params = {name: x for name, x in params.items() if name != "critic"}
    if (spread := next((x for x in jax.tree.leaves(params) if not _is_here(x)), None)) is not None:
        of_all = mesh is not None and set(mesh.devices.flat) == spread.sharding.device_set
        return _on_this_host(policy, params, mesh if of_all and mesh else spread.sharding.mesh, rounding)
    if mesh is None or mesh.size == 1:
        if rounding is None and _is_ready(policy, params):
            return Weights(*_views(params, policy.config))
        bound = [x for x in jax.tree.leaves(params) if _is_array(x) and x.committed]
        device = next(iter(bound[0].devices())) if bound else None
        if device is not None:
            meshes = [jax.typeof(x).sharding.mesh for x in bound]
            spread = any(not mesh.empty and mesh.size > 1 for mesh in meshes)
            params = jax.device_put(params, _on_one_device(device) if spread else device)
        loop = loop_params(policy, params, options_for(device, rounding=rounding))
        return Weights(params if rounding is None else loop, loop, device=device)
    stacked = isinstance(params["layers"], dict)
    moved = bytes_to_move(params, named_shardings(parameter_specs(policy.config, mesh, stacked, params), mesh))
    start = time.perf_counter()
    if not all(_is_on(x, mesh) for x in jax.tree.leaves(params)):
        params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
    loop = jax.block_until_ready(converter(policy, params, mesh, rounding)(policy, params))
    return Weights(loop, loop, mesh, moved, time.perf_counter() - start)


class Converter(NamedTuple):
    """Programs that give a mesh the loop's weights: the layers one by one, so that no more than one is there twice.

    A program for all would gather them all, and then copy each to where it stays.
    """

    others: Any  # of all arrays but those of layers
    layers: tuple[Any, ...]  # of each kind: of its layers, stacked, and the place of one; or of one, and None
    options: LoopOptions

    def __call__(self, policy: Policy, params: Params) -> Params:
        layers, config = params["layers"], policy.config
        kinds = config.kind_of_layer or (0,) * config.num_layers
        found = []
        for number, kind in enumerate(kinds):
            if isinstance(layers, tuple):
                given: Any = layers[number], None
            else:
                given = of_kind(layers, config, kind), np.int32(place_of(config, number))
            found.append(self.layers[kind](policy, *given, self.options))
        return self.others(policy, outside_layers(params), self.options) | {"layers": tuple(found)}


def converter(policy: Policy, params: Params, mesh: Mesh, rounding: str | None = None) -> Converter:
    """`loop_params` with the loop's shardings on a mesh of several devices."""
    options = options_for(mesh.devices.flat[0], mesh, rounding)
    target = named_shardings(loop_specs(policy, mesh, params, options), mesh)
    others = jax.jit(_others, static_argnums=(0, 2), out_shardings=outside_layers(target))
    firsts = [target["layers"][policy.config.layers_of(kind)[0]] for kind in range(len(policy.config.each_kind))]
    layers = tuple(
        jax.jit(_layer, static_argnums=(0, 3), out_shardings=with_inputs_last(one) if options.inputs_last else one)
        for one in firsts
    )
    return Converter(others, layers, options)


def outside_layers(params: Params) -> Params:
    """All but the layers."""
    return {name: x for name, x in params.items() if name != "layers"}


def _is_here(x: Any) -> bool:
    """Whether all of x is on devices of this host."""
    return not _is_array(x) or x.is_fully_addressable


def _on_this_host(policy: Policy, params: Params, mesh: Mesh, rounding: str | None) -> Weights:
    """`take_weights` of parameters on the devices of several hosts: one program gives each unit a copy of its own."""
    wide, start = by_unit(mesh), time.perf_counter()
    stacked = isinstance(params["layers"], dict)
    moved = bytes_to_move(params, named_shardings(parameter_specs(policy.config, wide, stacked, params), wide))
    own = of_this_host(mesh)
    loop = jax.block_until_ready(own_copy(converter(policy, params, wide, rounding)(policy, params), own))
    return Weights(loop, loop, own, moved, time.perf_counter() - start)


def _on_one_device(device: jax.Device) -> NamedSharding:
    """A sharding on a mesh of one device. With the device alone, arrays from a larger mesh would keep its type."""
    return NamedSharding(Mesh(np.array([device]), ("data",)), PartitionSpec())


def _is_array(x: Any) -> bool:
    """Whether x is a concrete array, not a tracer."""
    return isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)


def _is_ready(policy: Policy, params: Params) -> bool:
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


def _views(params: Params, config: ModelConfig) -> tuple[Params, Params]:
    """The parameters, and the same with a dict per layer, as views of their memory.

    The views keep the memory alive. While they exist, donating the parameters copies them instead of overwriting them.
    """
    memory = jax.tree.map(np.from_dlpack, params)
    place = partial(jax.device_put, may_alias=True)
    whole = jax.tree.map(place, memory)
    layers = unstack(memory, config)["layers"]
    return whole, whole | {"layers": jax.tree.map(place, layers)}


def abstract_weights(
    policy: Policy, params: Any, mesh: Mesh | None = None, weight_dtype: str | Any | None = None
) -> Params:
    """ShapeDtypeStructs of the loop's weights, with shardings and layouts on a mesh, for compiling ahead of time.

    params: arrays or ShapeDtypeStructs. The other arguments are those of `take_weights`.
    """
    device = None if mesh is None else mesh.devices.flat[0]
    options = options_for(device, mesh, kind_of(weight_dtype) or policy.rounding)
    shapes = jax.eval_shape(lambda p: loop_params(policy, p, options), params)
    if mesh is None:
        return shapes
    places = named_shardings(loop_specs(policy, mesh, params, options), mesh)
    if options.inputs_last:
        places["layers"] = tuple(map(with_inputs_last, places["layers"]))
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, places)


def _is_on(x: Any, mesh: Mesh) -> bool:
    return isinstance(x, jax.Array) and x.sharding.device_set == set(mesh.devices.flat)


@partial(jax.jit, static_argnums=(0, 2))
def loop_params(policy: Policy, params: Params, options: LoopOptions = PLAIN) -> Params:
    """The parameters with a dict per layer, in the policy's dtype; "head" is the unembedding if it is another."""
    layers = tuple(_layer(policy, layer, None, options) for layer in unstack(params, policy.config)["layers"])
    return _others(policy, outside_layers(params), options) | {"layers": layers}


def _others(policy: Policy, params: Params, options: LoopOptions) -> Params:
    """`loop_params` of all arrays but those of layers."""
    # The decoder casts the norms of layers, but not the final norm.
    out = {name: x if name == "final_norm" else x.astype(policy.dtype) for name, x in params.items()}
    if options.own_head(policy) or "unembed_lora_out" in out:  # no step shall put that beside the unembedding
        head = jnp.pad(policy.unembedding(out), [(0, n) for n in options.padding(policy)])
        out["head"] = head.astype(policy.activation_dtype) if options.wide_head else head
        for name in ("unembed", "unembed_lora_out"):
            out.pop(name, None)
    return out


def _layer(policy: Policy, layers: Params, number: Any, options: LoopOptions) -> Params:
    """`loop_params` of one layer. number: which, of stacked ones; None if `layers` are the arrays of one."""
    layer = layers if number is None else jax.tree.map(lambda x: x[number], layers)
    # Rounded from the policy's dtype, as in the update.
    return quantised_layer(cast(layer, policy.dtype), options.rounding)


def loop_specs(policy: Policy, mesh: AnyMesh, adapted: Any = None, options: LoopOptions = PLAIN) -> Any:
    """A PartitionSpec for each array of `loop_params`. adapted: parameters whose LoRA adapters are included."""
    specs = parameter_specs(policy.config, mesh, False, adapted)
    options = options._replace(vocab_shards=mesh.shape.get("tensor", 1))
    if options.own_head(policy) or "unembed_lora_out" in specs:
        for name in ("unembed", "unembed_lora_out"):
            specs.pop(name, None)
        specs["head"] = PartitionSpec("tensor") if options.vocab_shards > 1 else PartitionSpec()
    if options.rounding is not None:
        each = enumerate(specs["layers"])
        specs["layers"] = tuple(quantised_specs(policy.config.of_layer(number), mesh, layer) for number, layer in each)
    return specs | {"layers": _with_rounded(specs["layers"], adapted, policy.config, mesh)}


def _with_rounded(specs: tuple[Any, ...], given: Any, config: ModelConfig, mesh: AnyMesh) -> tuple[Any, ...]:
    """The specs of layers where some weights of the parameters given are kept rounded: of each of their arrays."""
    if given is None:
        return specs
    layers, out = jax.eval_shape(lambda params: unstack(params, config)["layers"], given), []
    for number, (own, layer) in enumerate(zip(specs, layers, strict=True)):
        rounded = {name: w for name, w in layer.items() if is_rounded(w)}
        config_of = config.of_layer(number)
        split = {
            name: jax.tree.map(lambda x, n=name, c=config_of: split_spec(n, x.shape, c, mesh), w)
            for name, w in rounded.items()
        }
        out.append(own | split)
    return tuple(out)


def shardings(tree: Any, mesh: Mesh) -> Any:
    """Shardings of the engine's arrays: rows and prompt slots over SAMPLED_ROWS.

    Heads of caches are over "tensor", where it divides them.
    """
    size = mesh.shape.get("tensor", 1)

    def place(x: Any, heads: int = 0) -> NamedSharding:
        axes: list[Any] = [row_axes(mesh, SAMPLED_ROWS) if x.ndim else None]
        axes += ["tensor"] if heads and size > 1 and heads % size == 0 else []
        return NamedSharding(mesh, PartitionSpec(*axes[: x.ndim]))

    def cache(layer: LayerCache) -> LayerCache:
        return LayerCache(*(None if x is None else place(x, x.shape[1]) for x in layer))  # type: ignore[arg-type]

    def of_layer(layer: Any) -> Any:
        if isinstance(layer, State):
            heads = layer.heads
            places: Any = place(layer.window), None if heads is None else place(heads, heads.shape[1])
            return State(*places)
        return None if layer is None else cache(layer)

    if isinstance(tree, PrefixCache | RingCache | Tail):
        rest = jax.tree.map(place, tree._replace(layers=()))
        return rest._replace(layers=tuple(map(of_layer, tree.layers)))
    return jax.tree.map(place, tree)
