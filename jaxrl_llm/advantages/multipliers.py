"""Advantages scaled by, or with a bonus from, a second signal: entropies, distances, likelihoods.

Functions work on arrays; `mask` bool[N, L] marks the tokens to use; values outside it are ignored, even NaN. Tokens
with the same key (int32[N] or [N, L]) share a statistic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import group_advantage
from jaxrl_llm.core.missing_fields import absent
from jaxrl_llm.core.part_checks import require_function
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.shapes import FLOATS, check_array
from jaxrl_llm.core.trajectory import Trajectories, bucket_moments, bucket_sums
from jaxrl_llm.core.transform import Transform, stateless
from jaxrl_llm.utils.errors import InputError, require_choice

Number = jax.Array | float
COMPOSITIONS = ("additive", "multiplicative")


@part
def revised(advantages: Callable[[Trajectories], jax.Array], needs: Iterable[str] = ()) -> Transform:
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


def token_moments(
    values: jax.Array, mask: jax.Array, keys: jax.Array, ddof: int = 0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Count, mean and standard deviation over the masked tokens that share a token's key, f32[N, L] each."""
    keys = jnp.broadcast_to(keys.reshape(values.shape[0], -1), values.shape)
    moments = bucket_moments(keys.reshape(-1), jnp.where(mask, values, jnp.nan).reshape(-1), ddof)
    return tuple(x.reshape(values.shape) for x in moments)  # type: ignore[return-value]


def standard_scores(
    values: jax.Array, mask: jax.Array, keys: jax.Array, ddof: int = 0, epsilon: float = 1e-8
) -> jax.Array:
    """(x - mean) / (std + epsilon) over the masked tokens of a key; 0 outside the mask and where values are equal."""
    _, mean, deviation = token_moments(values, mask, keys, ddof)
    differ = mask & (deviation > 1e-6 * jnp.abs(mean))  # by more than rounding
    return jnp.where(differ, (values - mean) / jnp.where(differ, deviation + epsilon, 1.0), 0.0)


def row_mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    """Mean f32[N] over the masked tokens of each row; 0 where there are none."""
    return jnp.sum(jnp.where(mask, values, 0.0), axis=1) / jnp.maximum(jnp.sum(mask, axis=1), 1)


def position_keys(group: jax.Array, action_index: jax.Array, lengths: jax.Array, count: int) -> jax.Array:
    """int32[N, L]: one key per group and relative position, each row divided into `count` equal parts.

    Action t of T is in part min(floor(count t / T), count - 1). Tokens that are not actions get the key of part 0.
    """
    _, index = jnp.unique(group, return_inverse=True, size=group.shape[0])
    length = jnp.maximum(lengths, 1)[:, None].astype(jnp.int32)
    part = jnp.clip(count * jnp.maximum(action_index, 0) // length, 0, count - 1)
    return index[:, None] * count + part


def capped_bonus(advantages: jax.Array, bonus: jax.Array, share: Number) -> jax.Array:
    """A + min(max(bonus, 0), share |A|): a bonus that cannot flip the sign of a negative advantage if share < 1."""
    return advantages + jnp.minimum(jnp.maximum(bonus, 0.0), share * jnp.abs(advantages))


def entropy_scaled(advantages: jax.Array, scores: jax.Array, strength: Number, clamp: bool = False) -> jax.Array:
    """A (1 + strength z) with z the standard score of a token's entropy (AEPO, 2510.14545).

    clamp: clamp the factor at 0; it is negative where z < -1 / strength.
    """
    factor = 1.0 + strength * scores
    return advantages * (jnp.maximum(factor, 0.0) if clamp else factor)


def regulated(
    advantages: jax.Array,
    gate: jax.Array,
    signal: jax.Array,
    mask: jax.Array,
    eta: Number,
    compose: Literal["additive", "multiplicative"] = "additive",
) -> jax.Array:
    """A + eta W sign(A) s (additive), or T A W / sum W + eta sign(A) s (multiplicative) (ERPO, 2603.28204).

    gate W >= 0 and signal s f32[N, L]; T and the sum are over the masked tokens of a row.
    """
    require_choice("compose", compose, COMPOSITIONS)
    gate = jnp.where(mask, gate, 0.0)
    if compose == "additive":
        return advantages + eta * gate * jnp.sign(advantages) * signal
    total, length = jnp.sum(gate, axis=1, keepdims=True), jnp.sum(mask, axis=1, keepdims=True)
    return advantages * length * gate / jnp.maximum(total, 1e-30) + eta * jnp.sign(advantages) * signal


def softmax_shares(scores: jax.Array, mask: jax.Array, temperature: Number) -> jax.Array:
    """T softmax(scores / temperature) over the T masked tokens of a row: weights of mean 1, f32[N, L]; 0 elsewhere."""
    logits = jnp.where(mask, scores / temperature, -jnp.inf)
    top = jnp.max(logits, axis=1, keepdims=True, initial=-1e30)
    exponentials = jnp.where(mask, jnp.exp(logits - top), 0.0)
    total = jnp.maximum(jnp.sum(exponentials, axis=1, keepdims=True), 1e-30)
    return jnp.sum(mask, axis=1, keepdims=True) * exponentials / total


def hellinger(affinity: jax.Array, squared: bool = True) -> jax.Array:
    """Distance in [0, 1] of distributions with the affinity sum sqrt(p q): 1 - affinity, or its square root."""
    distance = jnp.clip(1.0 - affinity, 0.0, 1.0)
    return distance if squared else jnp.sqrt(distance)


def relative_confidence(entropy: jax.Array, group: jax.Array, clamp: bool = False) -> jax.Array:
    """Y = 2 - H / (mean H of the group), f32[N]: above 1 for the more confident rows of a group (ETTRL, 2508.11356).

    entropy f32[N], NaN for rows to ignore (Y = 1, also where the group's mean is 0). clamp: clamp Y at 0.

    >>> print(relative_confidence(jnp.array([0.5, 1.0, 1.5]), jnp.zeros(3, jnp.int32)))
    [1.5 1.  0.5]
    """
    _, mean, _ = bucket_moments(group, entropy)
    known = ~jnp.isnan(entropy) & (mean > 1e-12)
    value = jnp.where(known, 2.0 - entropy / jnp.where(known, mean, 1.0), 1.0)
    return jnp.maximum(value, 0.0) if clamp else value


def novelty(mean_logp: jax.Array, group: jax.Array) -> jax.Array:
    """1 - exp(s - mean s of the group), f32[N]: positive for rows less likely than their group (XRPO, 2510.06672).

    s = mean_logp f32[N], the mean log-probability of the row's tokens, NaN for rows to ignore (novelty 0).
    """
    _, mean, _ = bucket_moments(group, mean_logp)
    return jnp.where(jnp.isnan(mean_logp), 0.0, -jnp.expm1(jnp.clip(mean_logp - mean, -20.0, 20.0)))


def length_weighted_advantage(
    reward: jax.Array, lengths: jax.Array, group: jax.Array, limit: Number = 5.0, epsilon: float = 1e-6
) -> jax.Array:
    """(r - mu) / (sd + epsilon) with mean and population deviation over the group's tokens, f32[N] (HAPO, 2509.16591).

    That is, each row's reward f32[N] is weighted by its length f32[N]. A group in which any |advantage| reaches `limit`
    uses `group_advantage` instead. NaN: not scored, advantage 0. Equal rewards: 0.

    >>> r, lengths = jnp.array([1.0, 0, 0]), jnp.array([4.0, 2, 2])
    >>> print(length_weighted_advantage(r, lengths, jnp.zeros(3, jnp.int32)).round(4))
    [ 1. -1. -1.]
    """
    usual = group_advantage(reward, group, epsilon=epsilon)
    known = ~jnp.isnan(reward)
    _, centre, deviation = bucket_moments(group, reward)
    length, centred = jnp.where(known, lengths, 0.0), jnp.where(known, reward - centre, 0.0)
    tokens, total = bucket_sums(group, length, length * centred)
    tokens = jnp.maximum(tokens, 1.0)
    centred = jnp.where(known, centred - total / tokens, 0.0)
    (squares,) = bucket_sums(group, length * centred**2)
    differ = known & (deviation > 1e-7 * jnp.maximum(jnp.abs(centre), 1.0))
    value = jnp.where(differ, centred / (jnp.sqrt(squares / tokens) + epsilon), 0.0)
    (extreme,) = bucket_sums(group, (jnp.abs(value) >= limit).astype(jnp.float32))
    return jnp.where(extreme > 0, usual, value)


def mixture_share(gap: jax.Array, cap: Number, fraction: jax.Array) -> jax.Array:
    """alpha / (1 + alpha) with alpha = min(|gap|, cap) / fraction, f32[]; 0 where the fraction is 0 (DCPO, 2601.12730).

    >>> print(round(float(mixture_share(jnp.array(0.1), 0.1, jnp.array(0.5))), 4))
    0.1667
    """
    alpha = jnp.minimum(jnp.abs(gap), cap) / jnp.where(fraction > 0, fraction, 1.0)
    return jnp.where(fraction > 0, alpha / (1.0 + alpha), 0.0)


def last_entropy(batch: Trajectories) -> jax.Array:
    """f32[]: mean token entropy in the last update, 0 before the first."""
    return (batch.feedback or {}).get("entropy", jnp.float32(0))
