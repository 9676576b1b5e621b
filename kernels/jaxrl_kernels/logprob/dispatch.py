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


class HeadOptions(NamedTuple):
    """Static options of the implementations, of `fused_logprob` and of `fused_sample`."""

    softcap: float
    implementation: str | None  # "pallas", "xla" or None
    block_size: int | None
    row_block: int | None
    vocab_size: int | None = None  # without padding


def slice_parts(inputs: Inputs, options: HeadOptions) -> SliceResult:
    """The result for a slice of the vocabulary.

    Differentiable once, in reverse mode, with respect to hidden and unembedding. m is not differentiated.
    """
    targets, most = inputs.targets, inputs.unembedding.shape[0] if inputs.limit is None else inputs.limit
    targets = jnp.where((targets >= 0) & (targets < most), targets, -1)  # a tile can be padded
    return _parts(Inputs(*vary_together(*inputs._replace(targets=targets))), options)


def slice_normaliser(inputs: Inputs, options: HeadOptions) -> Normaliser:
    """The normaliser of the slice alone, f32[M]; targets and support are not read. Gradients are zero."""
    nowhere = jnp.full(inputs.hidden.shape[:1], -1, jnp.int32)
    arrays = jax.lax.stop_gradient(inputs._replace(targets=nowhere, support=None))
    parts = _forward(Inputs(*vary_together(*arrays)), options)[0]
    return Normaliser(parts.m, parts.log_l)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _parts(inputs: Inputs, options: HeadOptions) -> SliceResult:
    return _forward(inputs, options)[0]


def _forward(inputs: Inputs, options: HeadOptions) -> tuple[SliceResult, tuple[Inputs, SliceResult]]:
    def blocked(inputs: Inputs) -> SliceResult:
        return finish(blocked_sums(inputs, options.softcap, _width(inputs, options)))

    def pallas(inputs: Inputs, interpret: bool) -> SliceResult:
        return finish(
            pallas_sums(inputs, plan(inputs, options.softcap, options.block_size, options.row_block, interpret))
        )

    parts = _on_this_platform(blocked, pallas, options, inputs)
    return parts, (inputs, parts)


def _backward(options: HeadOptions, saved: tuple[Inputs, SliceResult], cotangents: SliceResult) -> tuple[Inputs]:
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


def _width(inputs: Inputs, options: HeadOptions) -> int:
    return min(options.block_size or BLOCK_SIZE, inputs.unembedding.shape[0])


def _on_this_platform(blocked: Any, pallas: Any, options: HeadOptions, inputs: Inputs, *rest: Any) -> Any:
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
    check_head(hidden, unembedding, (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float64), "M", softcap, sizes)
    if (hidden.dtype == jnp.float64) != (unembedding.dtype == jnp.float64):
        raise ValueError(f"hidden and unembedding must both be float64, found {hidden.dtype} and {unembedding.dtype}")
    rows = hidden.shape[:1]
    if targets.shape != rows or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets must be int32[{rows[0]}], found {targets.dtype}{list(targets.shape)}")
    if jnp.shape(temperature) not in ((), rows):
        raise ValueError(f"temperature must be a scalar or f32[{rows[0]}], found shape {list(jnp.shape(temperature))}")
    if isinstance(temperature, float | int) and not temperature > 0:
        raise ValueError(f"temperature must be above 0, found {temperature}; for greedy decoding use the argmax")
    if support_floor is not None and support_floor.shape != rows:
        raise ValueError(f"support_floor must be f32[{rows[0]}], found shape {list(support_floor.shape)}")


def check_head(
    hidden: jax.Array, unembedding: jax.Array, dtypes: tuple[Any, ...], rows: str, softcap: float,
    sizes: dict[str, int | None],
) -> None:  # fmt: skip
    """`check`, of what `fused_sample` takes too. rows: what the number of rows is called."""
    for name, array in (("hidden", hidden), ("unembedding", unembedding)):
        if array.ndim != 2 or array.dtype not in dtypes:
            raise ValueError(f"{name} must be a float32 or bfloat16 matrix, found {array.dtype}{list(array.shape)}")
    if hidden.shape[1] != unembedding.shape[1]:
        raise ValueError(
            f"hidden [{rows}, D] and unembedding [V, D] must have the same D, "
            f"found {list(hidden.shape)} and {list(unembedding.shape)}"
        )
    if unembedding.shape[0] == 0:
        raise ValueError("unembedding has no rows: the vocabulary is empty")
    if not softcap >= 0:
        raise ValueError(f"softcap must be 0 (none) or above, found {softcap}")
    for name, size in sizes.items():
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, found {size}")
    if (limit := sizes["vocab_size"]) is not None and limit > unembedding.shape[0]:
        raise ValueError(f"vocab_size is {limit}, but the unembedding has {unembedding.shape[0]} rows")


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
    options: HeadOptions,
) -> tuple[jax.Array, jax.Array]:
    """logp and entropy, f32[M], of an unsharded vocabulary; temperature f32[M], the rest as in `fused_logprob`."""
    limit = None if options.vocab_size is None else jnp.int32(options.vocab_size)
    inputs = Inputs(hidden, unembedding, targets, temperature, None, limit)
    if floor is not None:
        inputs = inputs._replace(support=Support(floor, slice_normaliser(inputs, options)))
    parts = slice_parts(inputs, options)
    return parts.target_logit - parts.m - parts.log_l, parts.entropy


def by_slices(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    temperature: jax.Array,
    floor: jax.Array | None,
    options: HeadOptions,
    axis_name: str | tuple[str, ...],
) -> tuple[jax.Array, jax.Array]:
    """As `by_whole`, inside `jax.shard_map`, from this device's slice [V / S, D]; the same on all devices of the axis.

    All arrays but the unembedding are replicated over the axis, and targets are global token ids. With check_vma=False,
    take gradients outside of the `shard_map`: inside, JAX's transposition of collectives makes gradients of a loss that
    is replicated over the axis S times as large.
    """
    mine = unembedding.shape[0]
    vocabulary, offset = mine * jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name) * mine
    limit = None if options.vocab_size is None else jnp.int32(options.vocab_size - offset)
    vocabulary = options.vocab_size or vocabulary
    known = (targets >= 0) & (targets < vocabulary)
    places = jnp.where(known, targets - offset, -1)
    inputs = Inputs(hidden, unembedding, places, temperature, None, limit)
    if floor is not None:
        inputs = inputs._replace(support=Support(floor, _normaliser(slice_normaliser(inputs, options), axis_name)))
    parts = slice_parts(inputs, options)
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
