"""Sources of log-probabilities, their log-ratios, and estimators of KL divergences from them."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxrl_llm.core.trajectory import Trajectories, weighted
from jaxrl_llm.utils.errors import InputError, unknown

SOURCES = {
    "behaviour": "behaviour_logp", "untruncated": "untruncated_logp", "old": "old_logp", "reference": "reference_logp",
    "previous": "previous_logp",
}  # fmt: skip
ROUNDING = 1e-5  # log-ratios, and differences of ratios, up to this size are the rounding of two forward passes
LARGEST = 20.0  # exp(20) = 5e8 is far outside any clip range, and its square is finite in float32


def needed(name: str) -> frozenset[str]:
    """The batch field that the loop must compute for one of SOURCES: none for "behaviour", which every batch has.

    Nor for "untruncated", the same before filters and hooks that forbid tokens: "behaviour" where a batch has no other.

    Raises InputError for another name.
    """
    if name not in SOURCES:
        raise unknown("log-probability source", name, SOURCES)
    return frozenset() if name in ("behaviour", "untruncated") else frozenset({SOURCES[name]})


def source(batch: Trajectories, name: str) -> jax.Array:
    """Log-probabilities f32[N, L] of one of SOURCES; InputError if the batch does not have them."""
    if name not in SOURCES:
        raise unknown("log-probability source", name, SOURCES)
    value = getattr(batch, SOURCES[name])
    if value is None and name == "untruncated":
        value = batch.behaviour_logp
    if value is None:
        raise InputError(f"the objective needs {SOURCES[name]}, which the batch does not have")
    return value


def log_ratio(logp: jax.Array, other: jax.Array, mask: jax.Array) -> jax.Array:
    """logp - other where the mask is true, 0 elsewhere, clipped to +-LARGEST so that its exponential is finite."""
    return jnp.clip(jnp.where(mask, logp - other, 0.0), -LARGEST, LARGEST)


def log_ratio_sums(logp: jax.Array, other: jax.Array, batch: Trajectories) -> jax.Array:
    """f32[N]: logp - other f32[N, L], summed over the tokens of each row by their loss weights; not clipped."""
    inside = batch.loss_weights != 0
    return jnp.sum(weighted(jnp.where(inside, logp, 0.0) - jnp.where(inside, other, 0.0), batch), axis=1)


def k1(log_ratio: jax.Array) -> jax.Array:
    """l = logp - logp_ref: unbiased in value, but its gradient has mean zero on-policy; for rewards, not for losses."""
    return log_ratio


def k2(log_ratio: jax.Array) -> jax.Array:
    """l^2 / 2: biased in value, but on-policy its gradient is that of KL(pi || ref)."""
    return 0.5 * log_ratio**2


def k3(log_ratio: jax.Array) -> jax.Array:
    """exp(-l) - 1 + l: unbiased and never negative; on-policy its gradient is that of KL(ref || pi). Used by GRPO."""
    return jnp.expm1(-log_ratio) + log_ratio


def absolute(log_ratio: jax.Array) -> jax.Array:
    """|l|, but 0 with gradient 0 up to `ROUNDING`: the slope jumps at l = 0, where rounding would decide its sign."""
    return log_ratio * jnp.sign(beyond_rounding(log_ratio))


def beyond_rounding(log_ratio: jax.Array) -> jax.Array:
    """l, and 0 where |l| is at most `ROUNDING`."""
    return jnp.where(jnp.abs(log_ratio) > ROUNDING, log_ratio, 0.0)


def straight_through_k2(log_ratio: jax.Array, estimate: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The value of an estimator with the gradient of k2, which on-policy is that of KL(pi || ref)."""
    gradient = k2(log_ratio)
    return gradient + jax.lax.stop_gradient(estimate(log_ratio) - gradient)


_VALUES: dict[str, Callable[[jax.Array], jax.Array]] = {"k1": k1, "k2": k2, "k3": k3, "abs": absolute}
ESTIMATORS: dict[str, Callable[[jax.Array], jax.Array]] = {
    **_VALUES,
    **{f"{name}+": partial(straight_through_k2, estimate=f) for name, f in _VALUES.items()},
}
