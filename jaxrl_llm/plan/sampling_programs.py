"""The sampler's programs, compiled ahead of time for devices that need not be there, as an engine runs them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from jaxrl_llm.distributed.aot import Program, program_of
from jaxrl_llm.distributed.hosts import by_unit, of_this_host
from jaxrl_llm.models.mesh_axes import SAMPLED_ROWS, row_shards
from jaxrl_llm.models.parameters import without_critic
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.models.quantised import kind_of
from jaxrl_llm.models.stacks import of_kind
from jaxrl_llm.sampling.capacity import Size
from jaxrl_llm.sampling.decode import RingCache, begin, decode, empty_ring_cache, ends_of_prompts
from jaxrl_llm.sampling.draw import DrawSettings
from jaxrl_llm.sampling.filters import Filters
from jaxrl_llm.sampling.kv_cache import PrefixCache, PrefixSlots
from jaxrl_llm.sampling.prefill import empty_prefix_cache, prefill, prompts_together
from jaxrl_llm.sampling.rows import no_rows
from jaxrl_llm.sampling.speculative.tail import most_rows, source_length, tail_columns
from jaxrl_llm.sampling.speculative.verify import Tail, tail_of, verify
from jaxrl_llm.sampling.weights.layouts import (
    abstract_weights,
    converter,
    loop_params,
    options_for,
    outside_layers,
    shardings,
)

Shapes = Any  # a pytree of jax.ShapeDtypeStruct
NAMES = ("convert", "convert_layer", "prefill", "begin", "decode", "verify")


class Arrays(NamedTuple):
    """What an engine keeps on the devices of a host: shapes with shardings."""

    prompts: Shapes  # the weights that prefill reads
    loop: Shapes  # the weights of the decode loop
    prefix_cache: PrefixCache
    ring_cache: RingCache
    parked: Any = ()  # as the ring KV cache, beside it
    shares: bool = False  # the decode loop reads the training's own parameters

    @property
    def weights(self) -> Shapes:
        """Those weights that are no parameters of the training."""
        return None if self.shares else self.loop


def engine_arrays(
    policy: Policy, params: Shapes, mesh: Mesh, size: Size, cache_dtype: Any = None, own: Mesh | None = None,
    weight_dtype: Any = None, record: bool = False,
) -> Arrays:  # fmt: skip
    """The weights and caches of an engine of this size.

    params: shapes, with shardings, of the policy's parameters. mesh: of the training. cache_dtype: the policy's by
    default. own: the devices of a host to compile for; by default `of_this_host(mesh)`. weight_dtype: as for
    `take_weights`. record: with room for the experts of tokens.
    """
    params = without_critic(params)
    dtype, own = cache_dtype or policy.activation_dtype, own or of_this_host(mesh)
    prefix_cache = jax.eval_shape(lambda: empty_prefix_cache(policy, size.shape.prompts, size.width, dtype, record))
    ring_cache = jax.eval_shape(lambda: empty_ring_cache(policy, size.shape.rows, size.tokens, dtype, record))
    parked: Any = ()
    if size.parked:
        beside = jax.eval_shape(lambda: empty_ring_cache(policy, size.parked, size.tokens, dtype, record))
        parked = spread(beside, own)
    loop = abstract_weights(policy, params, own, weight_dtype)
    prefix_cache, ring_cache = (spread(tree, own) for tree in (prefix_cache, ring_cache))
    if mesh.size > 1 or (kind_of(weight_dtype) or policy.rounding) is not None:
        loop = spread(loop, own) if mesh.size == 1 else loop
        return Arrays(loop, loop, prefix_cache, ring_cache, parked)
    # On one CPU, in float32, the loop reads views of the parameters.
    floats = {x.dtype for x in jax.tree.leaves(params)} | {jnp.dtype(policy.dtype)}
    shares = mesh.devices.flat[0].platform == "cpu" and floats == {jnp.dtype(jnp.float32)}
    return Arrays(spread(params, own), spread(loop, own), prefix_cache, ring_cache, parked, shares)


def spread(tree: Shapes, own: Mesh) -> Shapes:
    """Shapes with the shardings of an engine's arrays on a host's devices."""
    places: Any = SingleDeviceSharding(own.devices.flat[0])
    places = jax.tree.map(lambda x: places, tree) if own.size == 1 else shardings(tree, own)
    return jax.tree.map(lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), tree, places)


def tail_arrays(arrays: Arrays, size: Size, own: Mesh, speculative_tokens: int) -> Tail:
    """The caches of the rows that decode by speculation, at most."""
    few = most_rows(size, own)
    numbers = jax.ShapeDtypeStruct((few,), jnp.int32)
    tokens = jax.ShapeDtypeStruct((few, tail_columns(size, speculative_tokens)), jnp.int32)
    caches = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (arrays.prefix_cache, arrays.ring_cache))
    return spread(jax.eval_shape(tail_of, *caches, numbers, numbers, numbers, tokens), own)


def compile_sampling(
    policy: Policy,
    params: Shapes,
    mesh: Mesh,
    size: Size,
    *,
    cache_dtype: Any = None,
    filtered: bool = False,
    names: tuple[str, ...] = NAMES,
    platform: str | None = None,
    own: Mesh | None = None,
    weight_dtype: Any = None,
    speculative_tokens: int = 0,
    record: bool = False,
) -> dict[str, Program]:
    """The programs of an engine of this size, by name, as a run calls them.

    "convert" makes the loop's weights from the parameters, where they are others; on a mesh "convert_layer" makes those
    of a layer, and "convert" the others. params, cache_dtype, own, weight_dtype, record: as for `engine_arrays`.
    filtered: with top-k, top-p or min-p. names: which programs to compile. platform: see `ahead_of_time`.
    speculative_tokens: above 0, "verify" is among them, with as many rows as it can have.
    """
    own = own or of_this_host(mesh)
    arrays, shape = engine_arrays(policy, params, mesh, size, cache_dtype, own, weight_dtype, record), size.shape
    params = without_critic(params)
    weights, prefix_cache, ring = arrays.loop, arrays.prefix_cache, arrays.ring_cache

    def number(dtype: Any, *shape: int) -> Any:
        """What the host makes for a call: it is on no particular device."""
        return jax.ShapeDtypeStruct(shape, dtype)

    rows = spread(jax.eval_shape(lambda: no_rows(shape.rows, policy.thinking)), own)
    filters = Filters(*(number(kind) for kind in (jnp.int32, jnp.float32, jnp.float32))) if filtered else None
    stops = number(jnp.int32, len(policy.config.eos_token_ids))
    settings = DrawSettings(number(jnp.uint32), number(jnp.float32), filters, None, stops)
    slots = None
    if not shape.fixed:
        slots = PrefixSlots(number(jnp.int32, shape.rows), number(jnp.int32, shape.prompts * shape.slots_per_prompt))
    together = prompts_together(size.width, size.shape.prompts, row_shards(own, SAMPLED_ROWS))
    asked = spread((number(jnp.int32, together, size.width), *[number(jnp.int32, together)] * 2), own)
    one, ends = number(jnp.int32), spread(jax.eval_shape(ends_of_prompts, prefix_cache, slots, rows), own)
    trace: dict[str, Callable[[], Any]] = {
        "prefill": lambda: prefill.trace(policy, arrays.prompts, prefix_cache, *asked),
        "begin": lambda: begin.trace(policy, weights, ends, ring.drawn, ring.step, rows, settings),
        "decode": lambda: decode.trace(policy, weights, prefix_cache, slots, ring, rows, settings, one, one),
    }
    if speculative_tokens:
        tail = tail_arrays(arrays, size, own, speculative_tokens)
        few, sources = most_rows(size, own), source_length(size)
        last = spread((jax.eval_shape(lambda: no_rows(few)), number(jnp.int32, few, sources)), own)
        trace["verify"] = lambda: verify.trace(policy, weights, tail, *last, settings, one, width=speculative_tokens)
    if not arrays.shares:
        trace |= _convert(policy, params, mesh, kind_of(weight_dtype) or policy.rounding)
    return {name: program_of(name, trace[name](), platform) for name in names if name in trace}


def _convert(policy: Policy, params: Params, mesh: Mesh, rounding: str | None) -> dict[str, Callable[[], Any]]:
    if mesh.size == 1:
        options = options_for(mesh.devices.flat[0], rounding=rounding)
        return {"convert": lambda: loop_params.trace(policy, params, options)}
    several = len({device.process_index for device in mesh.devices.flat}) > 1
    convert = converter(policy, params, by_unit(mesh) if several else mesh, rounding)
    number, config = jax.ShapeDtypeStruct((), jnp.int32), policy.config
    programs: dict[str, Callable[[], Any]] = {
        "convert": lambda: convert.others.trace(policy, outside_layers(params), convert.options)
    }
    for kind, layer in enumerate(convert.layers):
        name = f"convert_layer_{config.kinds[kind].name}" if config.kinds else "convert_layer"
        stacked = of_kind(params["layers"], config, kind)
        programs[name] = partial(layer.trace, policy, stacked, number, convert.options)
    return programs
