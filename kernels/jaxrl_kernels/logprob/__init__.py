"""Log-probability and entropy of tokens from hidden states, without the [M, V] logits."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_kernels.logprob.blocked import blocked_logprob
from jaxrl_kernels.logprob.reference import reference_logprob

__all__ = ["IMPLEMENTATIONS", "fused_logprob"]

IMPLEMENTATIONS = ("blocked", "reference")


def fused_logprob(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    softcap: float = 0.0,
    support_floor: jax.Array | None = None,
    block_size: int = 4096,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target and entropy of the distribution it is drawn from.

    The logits are `z = cap(hidden @ unembedding.T) / temperature` with `cap(x) = softcap * tanh(x / softcap)`. Without
    a floor, `logp = z[target] - logsumexp(z)` and `entropy = -sum_v p_v log p_v` with `p = softmax(z)`. With a floor,
    both are of `p` restricted to `{v: log p_v >= support_floor} + {target}` and renormalised: the distribution that
    top-k, top-p or min-p sampling draws from. Which tokens are kept is a constant in differentiation. Rounding can
    move a token across its own log-probability: put the floor a little below the least one to keep.

    Differentiable once, in reverse mode, with respect to `hidden` and `unembedding`; everything else has gradient
    zero. Peak memory is a few f32[M, block_size] arrays, and the unembedding's gradient where it is asked for.

    Args:
      hidden: [M, D] final hidden states, float32 or bfloat16 (products are summed in float32).
      unembedding: [V, D], a row for each token, float32 or bfloat16; a tied embedding is passed as it is.
      targets: int32[M] in [0, V). Outside that range logp is -inf.
      temperature: > 0, a scalar or f32[M].
      softcap: 0 for none, else the bound of the logits before temperature (Gemma 2). Static.
      support_floor: f32[M], <= 0; -inf keeps everything. None costs nothing; an array costs a second forward pass.
      block_size: columns of the vocabulary at a time. Static; changes speed and memory only.
      implementation: "blocked", "reference" (builds [M, V]; for tests), or None for the best on this platform.

    Returns:
      logp f32[M] and entropy f32[M] (in nats).

    Raises:
      ValueError: shapes or dtypes do not fit, a number is out of range, or the implementation is not known.

    >>> hidden, unembedding = jnp.ones((1, 2)), jnp.zeros((4, 2))
    >>> logp, entropy = fused_logprob(hidden, unembedding, jnp.array([3]))
    >>> print(f"{logp[0]:.4f} {entropy[0]:.4f}")
    -1.3863 1.3863
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"unknown implementation {implementation!r}: use None or one of {', '.join(IMPLEMENTATIONS)}")
    _check(hidden, unembedding, targets, temperature, softcap, support_floor, block_size)
    hidden, unembedding, targets, temperatures, floor = _vary_together(
        hidden,
        unembedding,
        targets.astype(jnp.int32),
        jnp.broadcast_to(jnp.asarray(temperature, jnp.float32), hidden.shape[:1]),
        None if support_floor is None else support_floor.astype(jnp.float32),
    )
    if implementation == "reference":
        return reference_logprob(hidden, unembedding, targets, temperatures, floor, float(softcap))
    width = min(block_size, unembedding.shape[0])
    return blocked_logprob(hidden, unembedding, targets, temperatures, floor, float(softcap), width)


def _check(
    hidden: jax.Array,
    unembedding: jax.Array,
    targets: jax.Array,
    temperature: float | jax.Array,
    softcap: float,
    support_floor: jax.Array | None,
    block_size: int,
) -> None:
    """Raise a ValueError that names the argument, what was found and what is expected."""
    for name, array in (("hidden", hidden), ("unembedding", unembedding)):
        if array.ndim != 2 or array.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise ValueError(f"{name} must be a float32 or bfloat16 matrix, found {array.dtype}{list(array.shape)}")
    if hidden.shape[1] != unembedding.shape[1]:
        raise ValueError(
            "hidden [M, D] and unembedding [V, D] must have the same D, "
            f"found {list(hidden.shape)} and {list(unembedding.shape)}"
        )
    if unembedding.shape[0] == 0:
        raise ValueError("unembedding has no rows: the vocabulary is empty")
    rows = hidden.shape[:1]
    if targets.shape != rows or not jnp.issubdtype(targets.dtype, jnp.integer):
        raise ValueError(f"targets must be int32[{rows[0]}], found {targets.dtype}{list(targets.shape)}")
    if jnp.shape(temperature) not in ((), rows):
        raise ValueError(f"temperature must be a scalar or f32[{rows[0]}], found shape {list(jnp.shape(temperature))}")
    if isinstance(temperature, float | int) and not temperature > 0:
        raise ValueError(
            f"temperature must be above 0, found {temperature}; for greedy decoding take the argmax instead"
        )
    if support_floor is not None and support_floor.shape != rows:
        raise ValueError(f"support_floor must be f32[{rows[0]}], found shape {list(support_floor.shape)}")
    if not softcap >= 0:
        raise ValueError(f"softcap must be 0 (none) or above, found {softcap}")
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, found {block_size}")


def _vary_together(*arrays: Any) -> tuple[Any, ...]:
    """Inside `jax.shard_map`, make all inputs vary over the axes that any of them varies over.

    A custom VJP must return a cotangent that varies as its input does: this puts the sum over data-parallel
    devices of the unembedding's gradient into the transpose of the cast. Outside of `shard_map` it does nothing.
    """

    def varying(array: jax.Array) -> frozenset[str]:
        return jax.typeof(array).manual_axis_type.varying

    together = frozenset().union(*(varying(array) for array in arrays if array is not None))

    def cast(array: jax.Array) -> jax.Array:
        missing = tuple(sorted(together - varying(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return tuple(None if array is None else cast(array) for array in arrays)
