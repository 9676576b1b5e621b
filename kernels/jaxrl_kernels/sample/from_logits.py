"""The draw of `fused_sample` from logits that are already in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_kernels.sample.dispatch import check_rows
from jaxrl_kernels.sample.noise import row_keys
from jaxrl_kernels.sample.tile import adjusted, draw, finish, of_tile


def sample_logits(
    logits: jax.Array,
    counters: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    allowed: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Draw a token for each row of logits, the same that `fused_sample` draws from hidden states with these logits.

    With z = logits / temperature, the token is drawn from p = softmax(z) over the allowed tokens; rows of temperature 0
    take the most probable one (the lowest of several), and z is then not divided. `logp = log p_token` and
    `entropy = -sum_v p_v log p_v`. The noise is that of `fused_sample`.

    Plain JAX without a loop over the vocabulary, so the compiler can shard logits over rows and over V. If the slices
    of V are multiples of 128, no device gathers the logits. Gradients are zero.

    Args:
      logits: f32[N, V], after any softcap. -inf (or below -1e30) forbids a token.
      counters: uint32[N, 4], (seed, prompt id, sample number, position) of each row, as in `fused_sample`.
      temperature: >= 0, a scalar or f32[N]; 0 is greedy.
      allowed: bool[N, V], or int8[N, V] with 0 for forbidden; None allows everything.

    Returns:
      token int32[N], logp f32[N] and entropy f32[N] (in nats). If no token is allowed: -1, -inf and 0. If a logit is
      NaN or inf: -1, NaN and NaN.

    Raises:
      ValueError: shapes or dtypes do not match, or the temperature is negative.

    >>> logits = jnp.log(jnp.array([[1.0, 2.0, 1.0]]))
    >>> token, logp, entropy = sample_logits(logits, jnp.zeros((1, 4), jnp.uint32), temperature=0.0)
    >>> print(token[0], f"{logp[0]:.4f} {entropy[0]:.4f}")
    1 -0.6931 1.0397
    """
    if logits.ndim != 2 or logits.dtype != jnp.float32:
        raise ValueError(f"logits must be a float32 matrix, found {logits.dtype}{list(logits.shape)}: use astype")
    if logits.shape[1] == 0:
        raise ValueError("logits have no columns: the vocabulary is empty")
    check_rows(logits.shape[0], logits.shape[1], counters, temperature, allowed)
    logits, temperature = jax.lax.stop_gradient((logits, jnp.asarray(temperature, jnp.float32)))
    temperatures = jnp.broadcast_to(temperature, logits.shape[:1])
    keys = row_keys(counters.astype(jnp.uint32))
    z = adjusted(logits, temperatures[:, None], None if allowed is None else allowed != 0, 0.0)
    return finish(draw(of_tile(z, keys, temperatures[:, None], 0), keys, temperatures))
