"""Tokens with a high covariance of log-probability and advantage, which drives the loss of entropy (2505.22617)."""

import jax
import jax.numpy as jnp

from jaxrl_llm.core.annotations import FractionNumber, Number
from jaxrl_llm.core.parts import Metrics, PolicyOutputs, Trajectories, Transform, control, counted, part, step_part
from jaxrl_llm.objectives.ratios import Ratio
from jaxrl_llm.objectives.surrogates import Surrogate, clip
from jaxrl_llm.selection.rows import share_down, token_noise


def covariance_terms(x: jax.Array, y: jax.Array, mask: jax.Array) -> jax.Array:
    """(x - mean x)(y - mean y) where the mask is true, 0 elsewhere; means over the mask. Any shape."""
    count = jnp.maximum(jnp.sum(mask), 1)
    x, y = (jnp.where(mask, v, 0.0) for v in (x, y))
    return jnp.where(mask, (x - jnp.sum(x) / count) * (y - jnp.sum(y) / count), 0.0)


def first_k(order: tuple[jax.Array, ...], mask: jax.Array, k: jax.Array) -> jax.Array:
    """The k masked elements that come first by `order[0]`, ties broken by `order[1]` and so on; bool, same shape."""
    flat = mask.reshape(-1)
    sorting = jnp.lexsort((*(x.reshape(-1) for x in reversed(order)), ~flat))
    rank = jnp.zeros(flat.shape, jnp.int32).at[sorting].set(jnp.arange(flat.size, dtype=jnp.int32))
    return mask & (rank < k).reshape(mask.shape)


def token_covariances(outputs: PolicyOutputs, batch: Trajectories) -> jax.Array:
    """`covariance_terms` of the batch's advantages and log-probabilities, over tokens with a weight, f32[N, L]."""
    return covariance_terms(batch.need("advantages"), outputs.logp, batch.loss_weights != 0)


@part
def count_batches(name: str = "batches") -> Transform:
    """Write the number of earlier batches as a control, the salt for random choices."""
    return counted(lambda step, batch: batch.with_controls(**{name: step.astype(jnp.float32)}))


@step_part
def draw_covariant(
    outputs: PolicyOutputs,
    batch: Trajectories,
    ratio: Ratio,
    low: Number,
    high: Number,
    share: FractionNumber,
    clip_low: Number,
    clip_high: Number,
) -> Trajectories:
    """Draw max(1, floor(share n)) of n tokens at random among the unclipped ones with low < covariance < high.

    Writes info["detached"] bool[N, L]. The control of `count_batches` salts the noise.
    """
    counts = batch.loss_weights != 0
    A = batch.need("advantages")
    rho = ratio(outputs, batch)
    cov = token_covariances(outputs, batch)
    clipped = -A * jnp.clip(rho, 1 - clip_low, 1 + clip_high) > -A * rho
    candidates = counts & ~clipped & (cov > low) & (cov < high)
    noise = token_noise(batch, control(batch, "batches"))
    number = jnp.maximum(1.0, share_down(jnp.sum(counts), share))
    return batch.with_info(detached=first_k((noise,), candidates, number))


@part
def clip_and_detach(low: float, high: float | None = None) -> Surrogate:
    """`clip`, with value and gradient 0 on the tokens of info["detached"]; high defaults to low."""
    clipped = clip(low, high)

    def surrogate(ratio: jax.Array, outputs: PolicyOutputs, batch: Trajectories) -> tuple[jax.Array, Metrics]:
        value, metrics = clipped(ratio, outputs, batch)
        detached = batch.need("detached")
        return jnp.where(detached, 0.0, value), {**metrics, "detached": detached.astype(jnp.float32)}

    return surrogate
