from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages.group import group_advantage, group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, FractionNumber, NonNegativeNumber, Number, Paper, PositiveNumber, Scale
from jaxrl_llm.core.arguments.ranges import NonNegative, Positive
from jaxrl_llm.core.buckets import bucket_moments, bucket_sums
from jaxrl_llm.core.parts import Array, Trajectories, counted_part, part
from jaxrl_llm.objectives import imitation, kl, log_probability, policy_gradient, token_mean, token_ratio
from jaxrl_llm.selection.rows import ranks_within, row_noise
from jaxrl_llm.utils.errors import is_off

Clipping = Literal["none", "one-side", "two-side", "ring"]
Weighting = Literal["none", "importance", "advantage"]


@method(paper="arXiv 2509.24203", test="test_regression_methods.py::test_rec_by_loop")
def rec_off_policy_reinforce(
    clip: Paper[Clipping] = "one-side",
    weight: Paper[Weighting] = "none",
    regulariser: Paper[Literal["none", "forward-kl", "k2"]] = "none",
    drop: Paper[Literal["none", "balance"]] = "none",
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    far_low: Code[float] = 0.6,
    far_high: Code[float] = 2.0,
    temperature: Code[Positive] = 1.0,
    coefficient: Code[NonNegative] = 0.1,
    scale: Paper[Scale] = "none",
    epsilon: Code[NonNegative] = 1e-6,
) -> Algorithm:
    """REC/REP/RED: off-policy REINFORCE (Group-Relative REINFORCE Is Off-Policy).

    A = r - mean_g (scale "std": over the population standard deviation + epsilon), rho = sg(pi / pi_behaviour), and

        loss = token mean of -sg(A W M) log pi + regulariser

    clip: M is 1 everywhere ("none"), where PPO does not clip ("one-side"), where 1 - clip_low <= rho <= 1 + clip_high
    ("two-side"), or "ring", also where A >= 0, rho <= 1 - far_low or A <= 0, rho >= 1 + far_high. weight: W = 1
    ("none"), rho ("importance") or exp(A / temperature) ("advantage", RED-Weight; its exponent is bounded at 20).
    regulariser, not masked by M: "none", "forward-kl" -c log pi (AsymRE) or "k2" c (log pi - log pi_behaviour)^2
    (OPMD), c = coefficient. drop "balance" (RED-Drop): random bad samples are dropped until they do not outnumber the
    good ones, r >= mean, in their group; statistics are over the kept samples; dropped ones have A = 0 but still count
    in the token mean.

    Members: REINFORCE ("none", "none", "none"); GRPO ("one-side", "importance", scale "std"); REC-OneSide, REC-TwoSide
    and REC-Ring with weight "none" or "importance"; `opmd`; `asymre`. The wider range clip_low 0.6, clip_high 2 learns
    faster. In a group of one A is 0 (released code: r).
    """
    score = masked_score(clip, weight, clip_low, clip_high, far_low, far_high, temperature)
    objective = policy_gradient(token_ratio(), log_probability(score), token_mean())
    if regulariser != "none" and not is_off(coefficient):
        # 2 c k2 = c l^2
        objective += coefficient * (imitation() if regulariser == "forward-kl" else 2.0 * kl("behaviour", "k2"))
    advantages = balanced_relative if drop == "balance" else group_relative
    return Algorithm(advantages(scale, ddof=0, epsilon=epsilon), objective)


@counted_part()
def balanced_relative(
    step: Array, batch: Trajectories, scale: Scale = "none", ddof: int = 0, epsilon: float = 1e-6
) -> Trajectories:
    """Group-relative advantages among the `balanced` samples; 0 for dropped ones."""
    reward = jnp.where(balanced(batch.scores, batch.group, row_noise(batch, step)), batch.scores, jnp.nan)
    A = group_advantage(reward, batch.group, scale=scale, ddof=ddof, epsilon=epsilon)
    return batch.replace(advantages=A[:, None] * batch.action_mask)


def clip_mask(
    shape: Clipping, ratio: Array, advantages: Array, low: Number, high: Number, far_low: Number, far_high: Number
) -> Array:
    """True where a token's gradient is kept (2509.24203), bool, elementwise.

    "none": everywhere. "one-side": PPO's clip, rho <= 1 + high where A >= 0, rho >= 1 - low where A <= 0.
    "two-side": 1 - low <= rho <= 1 + high. "ring": as "two-side", and where the step moves a distant ratio back towards
    1: A >= 0 and rho <= 1 - far_low, or A <= 0 and rho >= 1 + far_high.
    """
    good, bad = advantages >= 0, advantages <= 0
    if shape == "none":
        return jnp.ones(ratio.shape, bool)
    if shape == "one-side":
        return (good & (ratio <= 1 + high)) | (bad & (ratio >= 1 - low))
    inside = (ratio >= 1 - low) & (ratio <= 1 + high)
    if shape == "two-side":
        return inside
    return inside | (good & (ratio <= 1 - far_low)) | (bad & (ratio >= 1 + far_high))


def score_weight(shape: Weighting, ratio: Array, advantages: Array, temperature: Number = 1.0) -> Array:
    """Weight of the score function: 1, rho ("importance"), or exp(A / temperature) ("advantage"), elementwise."""
    if shape == "importance":
        return ratio
    # The exponent is clipped like log-ratios, so that weights and gradients stay finite.
    return jnp.exp(jnp.clip(advantages / temperature, -20.0, 20.0)) if shape == "advantage" else jnp.ones_like(ratio)


@part
def masked_score(
    clip: Clipping = "none",
    weight: Weighting = "none",
    clip_low: FractionNumber = 0.2,
    clip_high: NonNegativeNumber | None = None,
    far_low: NonNegativeNumber = 0.6,
    far_high: NonNegativeNumber = 2.0,
    temperature: PositiveNumber = 1.0,
) -> Callable[[Array, Trajectories], Array]:
    """A weight for `log_probability`: `clip_mask` times `score_weight`; clip_high defaults to clip_low."""
    high = clip_low if clip_high is None else clip_high

    def weigh(ratio: Array, batch: Trajectories) -> Array:
        A = batch.need("advantages")
        mask = clip_mask(clip, ratio, A, clip_low, high, far_low, far_high)
        return jnp.where(mask, score_weight(weight, ratio, A, temperature), 0.0)

    return weigh


def balanced(reward: Array, group: Array, noise: Array) -> Array:
    """bool[N]: the samples that are kept when random bad ones are dropped until they do not outnumber the good ones.

    Good: reward >= the group's mean. reward f32[N], NaN where not scored (dropped). Samples with the largest noise
    f32[N] are dropped first.
    """
    known = ~jnp.isnan(reward)
    good = known & (reward >= bucket_moments(group, reward)[1])
    bad = known & ~good
    number_good, number_bad = bucket_sums(group, good.astype(jnp.float32), bad.astype(jnp.float32))
    return good | (bad & (ranks_within(group, noise, noise, bad) >= number_bad - number_good))
