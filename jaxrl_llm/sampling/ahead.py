"""The engine's programs, compiled ahead of time for devices that need not be there."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_llm.distributed.mesh import Program
from jaxrl_llm.models.placement import SAMPLED_ROWS, row_shards
from jaxrl_llm.models.policy import Policy
from jaxrl_llm.sampling.cache import PrefixSlots
from jaxrl_llm.sampling.decode import DrawSettings, begin, decode, empty_ring_cache, no_rows
from jaxrl_llm.sampling.filters import Filters
from jaxrl_llm.sampling.prefill import PREFILL_TOKENS, empty_prefix_cache, prefill
from jaxrl_llm.sampling.schedule import Size
from jaxrl_llm.sampling.weights import abstract_weights, shardings


def compile_sampling(
    policy: Policy,
    params: Any,
    mesh: Mesh,
    size: Size,
    *,
    cache_dtype: Any = None,
    filtered: bool = False,
    stop_tokens: int = 1,
    names: tuple[str, ...] = ("prefill", "begin", "decode"),
) -> dict[str, Program]:
    """`prefill`, `begin` and `decode` as an engine of this size runs them, by name.

    params: shapes of the policy's parameters. cache_dtype: of the caches; the policy's by default. filtered: with
    top-k, top-p or min-p. stop_tokens: how many there are. names: which programs to compile.
    """
    dtype, shape = cache_dtype or policy.dtype, size.shape

    def spread(make: Any) -> Any:
        tree = jax.eval_shape(make)
        put = lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)  # noqa: E731
        return jax.tree.map(put, tree, shardings(tree, mesh))

    def number(dtype: Any, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec()))

    weights = abstract_weights(policy, params, mesh)
    prefix_cache = spread(lambda: empty_prefix_cache(policy, shape.prompts, size.width, dtype))
    ring = spread(lambda: empty_ring_cache(policy, shape.rows, size.tokens, dtype))
    rows = spread(lambda: no_rows(shape.rows))
    filters = Filters(*(number(kind) for kind in (jnp.int32, jnp.float32, jnp.float32))) if filtered else None
    settings = DrawSettings(number(jnp.uint32), number(jnp.float32), filters, None, number(jnp.int32, stop_tokens))
    slots = None
    if not shape.fixed:
        slots = PrefixSlots(number(jnp.int32, shape.rows), number(jnp.int32, shape.prompts * shape.slots_per_prompt))
    devices = row_shards(mesh, SAMPLED_ROWS)
    most = min(max(PREFILL_TOKENS // size.width, 1), -(-shape.prompts // devices))
    together = devices << (most.bit_length() - 1)
    tokens = spread(lambda: jnp.zeros((together, size.width), jnp.int32))
    each = spread(lambda: jnp.zeros(together, jnp.int32))
    one = number(jnp.int32)
    lower = {
        "prefill": lambda: prefill.lower(policy, weights, prefix_cache, tokens, each, each),
        "begin": lambda: begin.lower(policy, weights, prefix_cache, slots, ring.drawn, one, rows, settings),
        "decode": lambda: decode.lower(policy, weights, prefix_cache, slots, ring, rows, settings, one, one),
    }
    found = {}
    for name in names:
        lowered = lower[name]()
        found[name] = Program(name, lowered, lowered.compile())
    return found
