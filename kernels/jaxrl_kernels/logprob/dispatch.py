"""`fused_logprob` on one device, and over a vocabulary that is sharded into equal slices along a mesh axis; checks.

Device i of S along the axis has tokens i V / S to (i + 1) V / S. Each makes one pass over its slice (two with a floor),
and collectives on [M] arrays combine four numbers for each row. With s_i the logsumexp of a slice's logits, H_i the
entropy within it and w_i = exp(s_i - s),

    s = logsumexp_i s_i,    logp = z[target] - s,    entropy = sum_i w_i (H_i - log w_i).

In the backward pass the gradient of the hidden states is summed over the axis; that of the unembedding stays sharded.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_kernels.implementations import by_platform
from jaxrl_kernels.logprob.blocked import blocked_gradients, blocked_sums
from jaxrl_kernels.logprob.pallas_kernel import pallas_gradients, pallas_sums, plan
from jaxrl_kernels.logprob.tile import Cotangents, Inputs, Normaliser, SliceResult, Support, accumulation_dtype, finish
from jaxrl_kernels.partition import vary_together

BLOCK_SIZE = 2048  # of "xla"; 1024 to 8192 are equally fast on CPU


class LogprobOptions(NamedTuple):
    """Static options of the implementations."""

    softcap: float
    implementation: str | None  # "pallas", "xla" or None
    block_size: int | None
    row_block: int | None
    vocab_size: int | None = None  # without padding


def slice_parts(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    temperature: jax.Array,
    support: Support | None,
    options: LogprobOptions,
    limit: Any = None,
) -> SliceResult:
    """The result for the first `limit` tokens of a slice of the vocabulary; arguments as in `Inputs`.

    Differentiable once, in reverse mode, with respect to hidden and unembedding. m is not differentiated.
    """
    limit = None if limit is None else jnp.int32(limit)
    most = unembedding.shape[0] if limit is None else limit
    targets = jnp.where((targets >= 0) & (targets < most), targets, -1)  # a tile can be padded
    return _parts(Inputs(*vary_together(hidden, unembedding, targets, temperature, support, limit)), options)


def slice_normaliser(
    hidden: jax.Array, unembedding: jax.Array, temperature: jax.Array, options: LogprobOptions, limit: Any = None
) -> Normaliser:
    """The normaliser of the first `limit` tokens of the slice alone, f32[M]. Gradients are zero."""
    limit = None if limit is None else jnp.int32(limit)
    nowhere = jnp.full(hidden.shape[:1], -1, jnp.int32)
    arrays = jax.lax.stop_gradient((hidden, unembedding, nowhere, temperature, None, limit))
    parts = _forward(Inputs(*vary_together(*arrays)), options)[0]
    return Normaliser(parts.m, parts.log_l)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _parts(inputs: Inputs, options: LogprobOptions) -> SliceResult:
    return _forward(inputs, options)[0]


def _forward(inputs: Inputs, options: LogprobOptions) -> tuple[SliceResult, tuple[Inputs, SliceResult]]:
    def blocked(inputs: Inputs) -> SliceResult:
        return finish(blocked_sums(inputs, options.softcap, _width(inputs, options)))

    def pallas(inputs: Inputs, interpret: bool) -> SliceResult:
        return finish(
            pallas_sums(inputs, plan(inputs, options.softcap, options.block_size, options.row_block, interpret))
        )

    parts = _on_this_platform(blocked, pallas, options, inputs)
    return parts, (inputs, parts)


def _backward(options: LogprobOptions, saved: tuple[Inputs, SliceResult], cotangents: SliceResult) -> tuple[Inputs]:
    def blocked(inputs: Inputs, parts: SliceResult, wanted: Cotangents) -> tuple[jax.Array, jax.Array]:
        return blocked_gradients(inputs, parts, wanted, options.softcap, _width(inputs, options))

    def pallas(inputs: Inputs, parts: SliceResult, wanted: Cotangents, interpret: bool) -> tuple[jax.Array, jax.Array]:
        of = plan(inputs, options.softcap, options.block_size, options.row_block, interpret)
        return pallas_gradients(inputs, parts, wanted, of)

    _, *of_rest = cotangents
    d_hidden, d_unembedding = _on_this_platform(blocked, pallas, options, *saved, Cotangents(*of_rest))
    zero: Any = None
    return (Inputs(d_hidden, d_unembedding, zero, zero, zero, zero),)


_parts.defvjp(_forward, _backward)


def _width(inputs: Inputs, options: LogprobOptions) -> int:
    return min(options.block_size or BLOCK_SIZE, inputs.unembedding.shape[0])


def _on_this_platform(blocked: Any, pallas: Any, options: LogprobOptions, inputs: Inputs, *rest: Any) -> Any:
    """Call the implementation that the options or the platform ask for."""
    dtypes = {inputs.hidden.dtype, inputs.unembedding.dtype}
    no_kernel = inputs.hidden.shape[0] == 0 or {jnp.dtype(jnp.float16), jnp.dtype(jnp.float64)} & dtypes
    return by_platform(blocked, pallas, "xla" if no_kernel else options.implementation, inputs, *rest)


def check(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    temperature: float | jax.Array,
    softcap: float,
    support_floor: jax.Array | None,
    sizes: dict[str, int | None],
) -> None:
    """Raise a ValueError that names the argument, what was found and what is expected."""
    for name, array in (("hidden", hidden), ("unembedding", unembedding)):
        if array.ndim != 2 or array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64):
            raise ValueError(f"{name} must be a float32 or bfloat16 matrix, found {array.dtype}{list(array.shape)}")
    if (hidden.dtype == jnp.float64) != (unembedding.dtype == jnp.float64):
        raise ValueError(f"hidden and unembedding must both be float64, found {hidden.dtype} and {unembedding.dtype}")
    if hidden.shape[1] != unembedding.shape[1]:
        raise ValueError(
            "hidden [M, D] and unembedding [V, D] must have the same D, "
            f"found {list(hidden.shape)} and {list(unembedding.shape)}"
        )
    if unembedding.shape[0] == 0:
        raise ValueError("unembedding has no rows: the vocabulary is empty")
    if (limit := sizes.get("vocab_size")) is not None and limit > unembedding.shape[0]:
        raise ValueError(f"vocab_size is {limit}, but the unembedding has {unembedding.shape[0]} rows")
    rows = hidden.shape[:1]
    if targets.shape != rows or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets must be int32[{rows[0]}], found {targets.dtype}{list(targets.shape)}")
    if jnp.shape(temperature) not in ((), rows):
        raise ValueError(f"temperature must be a scalar or f32[{rows[0]}], found shape {list(jnp.shape(temperature))}")
    if isinstance(temperature, float | int) and not temperature > 0:
        raise ValueError(f"temperature must be above 0, found {temperature}; for greedy decoding use the argmax")
    if support_floor is not None and support_floor.shape != rows:
        raise ValueError(f"support_floor must be f32[{rows[0]}], found shape {list(support_floor.shape)}")
    if not softcap >= 0:
        raise ValueError(f"softcap must be 0 (none) or above, found {softcap}")
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, found {size}")


def rows_of(
    hidden: jax.Array, targets: jax.Array, temperature: float | jax.Array, support_floor: jax.Array | None
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """targets int32[M], temperature f32[M] and floor f32[M], the latter two under stop_gradient."""
    temperatures = jnp.broadcast_to(jnp.asarray(temperature, accumulation_dtype(hidden)), hidden.shape[:1])
    floor = None if support_floor is None else support_floor.astype(accumulation_dtype(hidden))
    return targets.astype(jnp.int32), *jax.lax.stop_gradient((temperatures, floor))


def by_whole(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    temperature: jax.Array,
    floor: jax.Array | None,
    options: LogprobOptions,
) -> tuple[jax.Array, jax.Array]:
    """logp and entropy, f32[M], of an unsharded vocabulary; temperature f32[M], the rest as in `fused_logprob`."""
    limit, support = options.vocab_size, None
    if floor is not None:
        support = Support(floor, slice_normaliser(hidden, unembedding, temperature, options, limit))
    parts = slice_parts(hidden, unembedding, targets, temperature, support, options, limit)
    return parts.target_logit - parts.m - parts.log_l, parts.entropy


def by_slices(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    temperature: jax.Array,
    floor: jax.Array | None,
    options: LogprobOptions,
    axis_name: str | tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    """As `by_whole`, inside `jax.shard_map`, from this device's slice [V / S, D]; the same on all devices of the axis.

    All arrays but the unembedding are replicated over the axis, and targets are global token ids. With check_vma=False,
    take gradients outside of the `shard_map`: inside, JAX's transposition of collectives makes gradients of a loss that
    is replicated over the axis S times as large.
    """
    mine = unembedding.shape[0]
    vocabulary, offset = mine * jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name) * mine
    limit = None if options.vocab_size is None else options.vocab_size - offset
    vocabulary = options.vocab_size or vocabulary
    support = None
    if floor is not None:
        of_slice = slice_normaliser(hidden, unembedding, temperature, options, limit)
        support = Support(floor, _normaliser(of_slice, axis_name))
    known = (targets >= 0) & (targets < vocabulary)
    places = jnp.where(known, targets - offset, -1)
    parts = slice_parts(hidden, unembedding, places, temperature, support, options, limit)
    here = (places >= 0) & (places < mine)
    return _combined(parts, here, known, axis_name)


def _normaliser(of_slice: Normaliser, axis_name: str | tuple[str, ...]) -> Normaliser:
    """The normaliser of the whole vocabulary. Differentiable with respect to log_l."""
    m = jax.lax.pmax(jax.lax.stop_gradient(of_slice.m), axis_name)
    shift = jax.lax.stop_gradient(of_slice.m) - m
    return Normaliser(m, jnp.log(jax.lax.psum(jnp.exp(shift + of_slice.log_l), axis_name)))


def _combined(
    parts: SliceResult, here: jax.Array, known: jax.Array, axis_name: str | tuple[str, ...]
) -> tuple[jax.Array, jax.Array]:
    """logp and entropy from the slices' results; here, known: bool[M], if the target is in this slice, or in any."""
    whole = _normaliser(Normaliser(parts.m, parts.log_l), axis_name)
    # Finite even if no token of the slice counts, so that products with its zero weight are zero.
    log_weight = jax.lax.stop_gradient(parts.m) - whole.m + parts.log_l - whole.log_l
    entropy = jax.lax.psum(jnp.exp(log_weight) * (parts.entropy - log_weight), axis_name)
    logit = jax.lax.psum(jnp.where(here, parts.target_logit, 0.0), axis_name)
    return jnp.where(known, logit, -jnp.inf) - whole.m - whole.log_l, entropy
