"""`fused_logprob` on one device, and over a vocabulary that is sharded into equal slices along a mesh axis; checks.

Device i of S along the axis has tokens i V / S to (i + 1) V / S. Each makes one pass over its slice (two with a floor),
and collectives on [M] arrays combine four numbers for each row. With s_i the logsumexp of a slice's logits, H_i the
entropy within it and w_i = exp(s_i - s),

    s = logsumexp_i s_i,    logp = z[target] - s,    entropy = sum_i w_i (H_i - log w_i).

In the backward pass the gradient of the hidden states is summed over the axis; that of the unembedding stays sharded.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_kernels.implementations import by_platform, found
from jaxrl_kernels.logprob.blocked import blocked_gradients, blocked_sums
from jaxrl_kernels.logprob.pallas_kernel import pallas_gradients, pallas_sums, plan
from jaxrl_kernels.logprob.tile import Cotangents, HeadOptions, Inputs, Normaliser, SliceResult, Support, finish
from jaxrl_kernels.partition import vary_together

BLOCK_SIZE = 2048  # of "xla"; 1024 to 8192 are equally fast on CPU


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _parts(inputs: Inputs, options: HeadOptions) -> SliceResult:
    """The result for a slice; differentiable with respect to hidden and unembedding. m is not differentiated."""
    return _forward(inputs, options)[0]


def _forward(inputs: Inputs, options: HeadOptions) -> tuple[SliceResult, tuple[Inputs, SliceResult]]:
    def blocked(inputs: Inputs) -> SliceResult:
        return finish(blocked_sums(inputs, options.softcap, _width(inputs, options)))

    def pallas(inputs: Inputs, interpret: bool) -> SliceResult:
        return finish(pallas_sums(inputs, plan(inputs, options, interpret)))

    parts = _on_this_platform(blocked, pallas, options, inputs)
    return parts, (inputs, parts)


def _backward(options: HeadOptions, saved: tuple[Inputs, SliceResult], cotangents: SliceResult) -> tuple[Inputs]:
    def blocked(inputs: Inputs, parts: SliceResult, wanted: Cotangents) -> tuple[jax.Array, jax.Array]:
        return blocked_gradients(inputs, parts, wanted, options.softcap, _width(inputs, options))

    def pallas(inputs: Inputs, parts: SliceResult, wanted: Cotangents, interpret: bool) -> tuple[jax.Array, jax.Array]:
        return pallas_gradients(inputs, parts, wanted, plan(inputs, options, interpret))

    d_hidden, d_unembedding = _on_this_platform(blocked, pallas, options, *saved, Cotangents(*cotangents[1:]))
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
        raise ValueError(f"targets must be int32[{rows[0]}], {found(targets)}")
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
            raise ValueError(f"{name} must be a float32 or bfloat16 matrix, {found(array)}")
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


def by_slices(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    temperature: jax.Array,
    floor: jax.Array | None,
    options: HeadOptions,
    axis_name: str | tuple[str, ...] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """logp and entropy, f32[M], of a vocabulary that is whole, or inside `jax.shard_map` sliced along a mesh axis.

    temperature: f32[M], the rest as in `fused_logprob`. With an axis, this device has the slice [V / S, D] of the
    unembedding; all other arrays are replicated over the axis, targets are global token ids, and the results are the
    same on all devices of the axis. With check_vma=False, take gradients outside of the `shard_map`: inside, JAX's
    transposition of collectives makes gradients of a loss that is replicated over the axis S times as large.
    """
    limit: Any = options.vocab_size
    offset: Any = 0
    mine, places = unembedding.shape[0], targets
    if axis_name is not None:
        vocabulary, offset = mine * jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name) * mine
        known = (targets >= 0) & (targets < (limit or vocabulary))
        places = jnp.where(known, targets - offset, -1)
    limit = None if limit is None else jnp.int32(limit - offset)
    inputs = Inputs(hidden, unembedding, places, temperature, None, limit)
    if floor is not None:
        nowhere = jnp.full(hidden.shape[:1], -1, jnp.int32)  # the normaliser reads no targets
        arrays = jax.lax.stop_gradient(inputs._replace(targets=nowhere))
        of_slice = _forward(Inputs(*vary_together(*arrays)), options)[0]
        whole = Normaliser(of_slice.m, of_slice.log_l)
        whole = whole if axis_name is None else _normaliser(whole, axis_name)
        inputs = inputs._replace(support=Support(floor, whole))
    most = mine if limit is None else limit
    within = jnp.where((places >= 0) & (places < most), places, -1)  # a tile can be padded
    parts = _parts(Inputs(*vary_together(*inputs._replace(targets=within))), options)
    if axis_name is None:
        return parts.target_logit - parts.m - parts.log_l, parts.entropy
    here = (places >= 0) & (places < mine)
    whole = _normaliser(Normaliser(parts.m, parts.log_l), axis_name)
    # Finite even if no token of the slice counts, so that products with its zero weight are zero.
    log_weight = jax.lax.stop_gradient(parts.m) - whole.m + parts.log_l - whole.log_l
    entropy = jax.lax.psum(jnp.exp(log_weight) * (parts.entropy - log_weight), axis_name)
    logit = jax.lax.psum(jnp.where(here, parts.target_logit, 0.0), axis_name)
    return jnp.where(known, logit, -jnp.inf) - whole.m - whole.log_l, entropy


def _normaliser(of_slice: Normaliser, axis_name: str | tuple[str, ...]) -> Normaliser:
    """The normaliser of the whole vocabulary. Differentiable with respect to log_l."""
    m = jax.lax.pmax(jax.lax.stop_gradient(of_slice.m), axis_name)
    shift = jax.lax.stop_gradient(of_slice.m) - m
    return Normaliser(m, jnp.log(jax.lax.psum(jnp.exp(shift + of_slice.log_l), axis_name)))
