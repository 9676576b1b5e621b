"""Advantages scaled by, or with a bonus from, a second signal: entropies, distances, likelihoods.

Functions work on arrays; `mask` bool[N, L] marks the tokens to use; values outside it are ignored, even NaN. Tokens
with the same key (int32[N] or [N, L]) share a statistic.
"""

from collections.abc import Callable, Iterable

import jax.numpy as jnp

from jaxrl_llm.core.annotations import Number
from jaxrl_llm.core.arguments.checks import require_function
from jaxrl_llm.core.buckets import bucket_moments
from jaxrl_llm.core.parts import Array, Trajectories, Transform, part, stateless
from jaxrl_llm.core.shapes import FLOATS, check_array
from jaxrl_llm.core.transform import absent
from jaxrl_llm.utils.errors import InputError


@part
def revised(advantages: Callable[[Trajectories], Array], needs: Iterable[str] = ()) -> Transform:
    """The transform that replaces the advantages of action tokens by `advantages(batch)` f32[N, L].

    Raises InputError when applied, for another shape or dtype, and for what the batch does not have yet.
    """
    require_function("the revised advantages", advantages, alone=True)

    def revise(batch: Trajectories) -> Trajectories:
        value = advantages(batch)
        if value is None and (said := absent(advantages, batch)):
            raise InputError(said)
        check_array("the revised advantages", value, FLOATS, batch.tokens.shape)
        return batch.replace(advantages=jnp.where(batch.action_mask, value, 0.0))

    return stateless(revise, needs)


def token_moments(values: Array, mask: Array, keys: Array, ddof: int = 0) -> tuple[Array, Array, Array]:
    """Count, mean and standard deviation over the masked tokens that share a token's key, f32[N, L] each."""
    keys = jnp.broadcast_to(keys.reshape(values.shape[0], -1), values.shape)
    moments = bucket_moments(keys.reshape(-1), jnp.where(mask, values, jnp.nan).reshape(-1), ddof)
    return tuple(x.reshape(values.shape) for x in moments)  # type: ignore[return-value]


def standard_scores(values: Array, mask: Array, keys: Array, ddof: int = 0, epsilon: float = 1e-8) -> Array:
    """(x - mean) / (std + epsilon) over the masked tokens of a key; 0 outside the mask and where values are equal."""
    _, mean, deviation = token_moments(values, mask, keys, ddof)
    differ = mask & (deviation > 1e-6 * jnp.abs(mean))  # by more than rounding
    return jnp.where(differ, (values - mean) / jnp.where(differ, deviation + epsilon, 1.0), 0.0)


def row_mean(values: Array, mask: Array) -> Array:
    """Mean f32[N] over the masked tokens of each row; 0 where there are none."""
    return jnp.sum(jnp.where(mask, values, 0.0), axis=1) / jnp.maximum(jnp.sum(mask, axis=1), 1)


def capped_bonus(advantages: Array, bonus: Array, share: Number) -> Array:
    """A + min(max(bonus, 0), share |A|): a bonus that cannot flip the sign of a negative advantage if share < 1."""
    return advantages + jnp.minimum(jnp.maximum(bonus, 0.0), share * jnp.abs(advantages))


def entropy_scaled(advantages: Array, scores: Array, strength: Number, clamp: bool = False) -> Array:
    """A (1 + strength z) with z the standard score of a token's entropy (AEPO, 2510.14545).

    clamp: clamp the factor at 0; it is negative where z < -1 / strength.
    """
    factor = 1.0 + strength * scores
    return advantages * (jnp.maximum(factor, 0.0) if clamp else factor)


def last_entropy(batch: Trajectories) -> Array:
    """f32[]: mean token entropy in the last update, 0 before the first."""
    return (batch.feedback or {}).get("entropy", jnp.float32(0))


@part
def weigh_advantages(weight: Callable[[Trajectories], Array]) -> Transform:
    """Multiply the advantages of each row by `weight(batch)` f32[N]."""
    require_function("the weight of advantages", weight)
    return stateless(lambda b: b.replace(advantages=b.need("advantages") * weight(b)[:, None]))
