"""Heterogeneous Adaptive Policy Optimization (HAPO).

The level is relative to the entropies of the last batch, of which `Levels` has what is needed. It is array state of the
sampler, and is in each row of a batch (`ENTRIES` of its info), so that the update computes the distribution that was
sampled from. `BY_LEVEL` is the sampler's hook.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.filters import drop_rows, mixed_groups, uniform_groups
from jaxrl_llm.advantages.group import group_advantage, on_actions
from jaxrl_llm.advantages.multi_reward import mixed_by, uniform_by
from jaxrl_llm.advantages.returns import scored_actions
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.algorithm import DynamicSampling
from jaxrl_llm.core.annotations import AboveOne, BelowOne, Code, Count, Fraction, NonNegative, Number, Ours
from jaxrl_llm.core.buckets import bucket_moments, bucket_sums
from jaxrl_llm.core.hooks import Context, Hook, State, entropy_of
from jaxrl_llm.core.parts import Trajectories, batch_part, chain, part, stateless
from jaxrl_llm.objectives import policy_gradient, token_clip, token_mean, token_ratio
from jaxrl_llm.objectives.surrogates import Bounds
from jaxrl_llm.rollouts.programs import Rollout, group, hooked


@batch_part
def with_entropy_levels(batch: Trajectories, pivot: float, tau: float = 0.0) -> Trajectories:
    """A function of the batch that writes info["entropy_level"] f32[N, L], the h of `hapo_heterogeneous`.

    Its scale goes into controls, with `tau`, for the temperature of the next samples (`entropy_levels`).
    """
    entropy = jnp.where(batch.action_mask, batch.need("entropy"), 1.0)
    counted = scored_actions(batch) & (batch.loss_weights != 0)
    scale = log_entropy_scale(entropy, counted, pivot)
    level = entropy_level(entropy, scale)
    strength = jnp.where(jnp.any(counted), tau, 0.0)
    batch = batch.with_controls(**dict(zip(ENTRIES, [*scale, strength], strict=True)))
    # The scale ignores unscored and dropped rows; their own levels do not matter.
    return batch.with_info(entropy_level=jnp.where(batch.action_mask, jnp.clip(level, -1.0, 1.0), 0.0))


@method(paper="arXiv 2509.16591", test="test_entropy_credit.py::test_hapo_against_a_loop")
def hapo_heterogeneous(
    pivot: Code[Fraction] = 0.8,
    advantage_strength: Code[NonNegative] = 1.0,
    clip_strength: Code[NonNegative] = 1.0,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    dual_clip: Code[AboveOne] = 10.0,
    extreme: Code[NonNegative] = 5.0,
    dynamic_sampling: Code[bool] = True,
    rounds: Code[Count] = 16,
    accuracy: Ours[str | None] = None,
    tau: Code[BelowOne] = 0.05,
) -> Algorithm:
    """Heterogeneous Adaptive Policy Optimization (HAPO).

    One quantity, the normalised log-entropy h in [-1, 1] of a token, sets its clip range and scales its advantage:
    z = (log H - q) / rms(log H - q) with q the quantile `pivot` of log H over the batch, and h = z / max z where z > 0,
    z / |min z| elsewhere.

        A = (r - mu) / (sd + 1e-6), mu and sd over the tokens of the group; plain GRPO where an |A| >= extreme
        lo = clip_low (1 - clip_strength h) where h <= 0;  hi = clip_high (1 + clip_strength h) where h > 0
        A' = A (1 + advantage_strength h) for h > 0 outside 1 - lo/2 < rho < 1 + hi/2, and for h <= 0 inside it
        loss = token mean of max(-A' rho, -A' clip(rho, 1 - lo, 1 + hi)), at most -A' dual_clip where A' < 0

    dynamic_sampling as in `dapo`: groups that are all right or all wrong (by the component `accuracy`, or the combined
    reward) are dropped and more prompts sampled, for up to `rounds` batches; dropped tokens are ignored in q, max and
    min too. The scripts also add DAPO's soft overlong penalty (4096 tokens) to the reward
    (`rewards.transforms.soft_overlong_penalty`).

    The released code divides by min z rather than |min z|, so that its branches for h < 0 are never taken. H is that of
    the sampling policy (code: of the current one, per mini-batch).

    Rollout: each token is drawn at T = T0 (1 + tau clip(h, -1, 1)), T0 the run's temperature, h of its entropy at T0
    on the scale of the last batch (`heated`); T0 before the first update. Ratios are of the policies at these
    temperatures, each policy with its own entropy.
    """
    uniform, mixed = (uniform_groups, mixed_groups) if accuracy is None else (uniform_by(accuracy), mixed_by(accuracy))
    credit = on_actions(weighted_by_length(extreme)), stateless(with_entropy_levels(pivot, tau), needs={"level_tau"})
    bounds = bounds_by_level(clip_low, clip_high, clip_strength)
    surrogate = token_clip(bounds, dual_clip, redistributed_by_level(bounds, advantage_strength))
    return Algorithm(
        transform=chain(drop_rows(uniform), *credit) if dynamic_sampling else chain(*credit),
        objective=policy_gradient(token_ratio(), surrogate, token_mean()),
        curriculum=DynamicSampling(mixed, rounds) if dynamic_sampling else None,
        rollout=heated(group()),
    )


@part
def weighted_by_length(extreme: float) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N]`: `length_weighted_advantage` of the scores."""
    return lambda b: length_weighted_advantage(b.scores, b.lengths, b.group, extreme)


@part
def bounds_by_level(low: float, high: float, slope: float) -> Bounds:
    """`level_bounds` of info["entropy_level"], for `token_clip`."""
    return lambda batch: level_bounds(batch.need("entropy_level"), low, high, slope)


@part
def redistributed_by_level(
    bounds: Bounds, strength: float
) -> Callable[[jax.Array, jax.Array, Trajectories], jax.Array]:
    """`redistributed` advantages by info["entropy_level"], for `token_clip`."""
    return lambda A, ratio, batch: redistributed(A, ratio, batch.need("entropy_level"), *bounds(batch), strength)


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


class Levels(NamedTuple):
    """The scale of entropy levels, and how much they change the temperature; numbers, or an array each."""

    pivot: Any = 0.0  # log-entropy of level 0
    deviation: Any = 1.0
    top: Any = 1.0  # of z = (log H - pivot) / deviation
    bottom: Any = -1.0
    tau: Any = 0.0  # 0: the temperature is the same for all tokens


ENTRIES = tuple(f"level_{name}" for name in Levels._fields)


def temperature_factor(entropy: jax.Array, levels: Levels) -> jax.Array:
    """What multiplies the temperature of tokens with these entropies f32[...], at the usual temperature, without
    truncation; under stop-gradient. 1 where a level is NaN, as in groups that failed.
    """
    scale = jnp.stack(jnp.broadcast_arrays(*levels[:4]))
    factor = level_temperature(entropy_level(entropy, scale), 1.0, levels.tau)
    return jax.lax.stop_gradient(jnp.where(jnp.isnan(factor), 1.0, factor))


def log_entropy_scale(entropy: jax.Array, mask: jax.Array, pivot: Number = 0.8) -> jax.Array:
    """f32[4]: pivot q, RMS deviation from it, and max and min of z = (log H - q) / deviation (HAPO, 2509.16591).

    q is the quantile `pivot` of the log-entropies of the masked tokens, without interpolation.
    """
    x = jnp.where(mask, jnp.log(jnp.maximum(jnp.where(mask, entropy, 1.0), 1e-8)), jnp.inf).reshape(-1)
    n = jnp.sum(mask)
    index = jnp.clip(jnp.round(pivot * (n - 1)), 0, x.size - 1).astype(jnp.int32)
    q = jnp.where(n > 0, jnp.sort(x)[index], 0.0)
    distance = jnp.where(mask.reshape(-1), x - q, 0.0)
    deviation = jnp.sqrt(jnp.maximum(jnp.sum(distance**2) / jnp.maximum(n, 1), 1e-8))
    return jnp.stack([q, deviation, jnp.max(distance) / deviation, jnp.min(distance) / deviation])


def entropy_level(entropy: jax.Array, scale: jax.Array) -> jax.Array:
    """h = z / max z where z > 0, z / |min z| elsewhere: in [-1, 1] on the tokens that `scale` f32[4] describes."""
    q, deviation, top, bottom = scale
    z = (jnp.log(jnp.maximum(entropy, 1e-8)) - q) / deviation
    return jnp.where(z > 0, z / jnp.where(top > 0, top, 1.0), z / jnp.where(bottom < 0, -bottom, 1.0))


def level_temperature(level: jax.Array, base: Number = 1.0, tau: Number = 0.05) -> jax.Array:
    """Sampling temperature base (1 + tau clip(h, -1, 1)), h computed with the scale of the last batch (2509.16591)."""
    return base * (1.0 + tau * jnp.clip(level, -1.0, 1.0))


def level_bounds(level: jax.Array, low: Number, high: Number, slope: Number) -> tuple[jax.Array, jax.Array]:
    """Clip widths by a level h in [-1, 1]: low (1 - slope h) where h <= 0, high (1 + slope h) where h > 0 (2509.16591).

    Low levels widen the lower side of the range, high levels the upper side.
    """
    return low * (1 - slope * jnp.minimum(level, 0.0)), high * (1 + slope * jnp.maximum(level, 0.0))


def redistributed(
    advantages: jax.Array, ratio: jax.Array, level: jax.Array, low: Number, high: Number, strength: Number
) -> jax.Array:
    """A (1 + strength h) where h > 0 and the ratio has moved, or h <= 0 and it has not; else A (HAPO, 2509.16591).

    A ratio has moved outside (1 - low / 2, 1 + high / 2). Elementwise.
    """
    still = (ratio > 1 - low / 2) & (ratio < 1 + high / 2)
    return advantages * jnp.where(still == (level <= 0), 1 + strength * level, 1.0)


def _factor(entropy: jax.Array, state: State) -> jax.Array:
    return temperature_factor(entropy, Levels(*(state[name] for name in ENTRIES)))


def _heat(logits: jax.Array, state: State, context: Context) -> jax.Array:
    return logits / _factor(entropy_of(logits), state)[:, None]


BY_LEVEL = Hook(_heat, "heated", tuple(zip(ENTRIES, Levels(), strict=True)), _factor)


@part
def heated(rollout: Rollout) -> Rollout:
    """A rollout whose tokens are drawn at temperatures by entropy, with the levels in the controls of the last update.

    Before the first update all tokens have the run's temperature. Provides the levels of each episode,
    info["level_tau"] and others (`ENTRIES`), from which the update computes the same temperatures.
    """
    return hooked(rollout, BY_LEVEL, ("level_tau",))
