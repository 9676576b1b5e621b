"""Heterogeneous Adaptive Policy Optimization (HAPO)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import drop_rows, mixed_groups, on_actions, uniform_groups
from jaxrl_llm.advantages.multi_reward import mixed_by, uniform_by
from jaxrl_llm.advantages.multipliers import length_weighted_advantage
from jaxrl_llm.advantages.returns import scored_actions
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm, DynamicSampling
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.entropy_levels import ENTRIES, entropy_level, log_entropy_scale
from jaxrl_llm.core.hyperparameters import CODE, OURS, Count, NonNegative
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import chain, stateless
from jaxrl_llm.objectives import policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.clips.token_clip import Bounds, level_bounds, redistributed, token_clip
from jaxrl_llm.rollouts.heated import heated
from jaxrl_llm.rollouts.programs import group


@part
def with_entropy_levels(pivot: float, tau: float = 0.0) -> Callable[[Trajectories], Trajectories]:
    """A function of the batch that writes info["entropy_level"] f32[N, L], the h of `hapo_heterogeneous`.

    Its scale goes into controls, with `tau`, for the temperature of the next samples (`entropy_levels`).
    """

    def levels(batch: Trajectories) -> Trajectories:
        entropy = jnp.where(batch.action_mask, batch.need("entropy"), 1.0)
        counted = scored_actions(batch) & (batch.loss_weights != 0)
        scale = log_entropy_scale(entropy, counted, pivot)
        level = entropy_level(entropy, scale)
        strength = jnp.where(jnp.any(counted), tau, 0.0)
        batch = batch.with_controls(**dict(zip(ENTRIES, [*scale, strength], strict=True)))
        # The scale ignores unscored and dropped rows; their own levels do not matter.
        return batch.with_info(entropy_level=jnp.where(batch.action_mask, jnp.clip(level, -1.0, 1.0), 0.0))

    return levels


@method(paper="arXiv 2509.16591", year=2025, test="test_entropy_credit.py::test_hapo_against_a_loop")
def hapo_heterogeneous(
    pivot: Annotated[float, CODE] = 0.8,
    advantage_strength: Annotated[NonNegative, CODE] = 1.0,
    clip_strength: Annotated[NonNegative, CODE] = 1.0,
    clip_low: Annotated[NonNegative, CODE] = 0.2,
    clip_high: Annotated[NonNegative, CODE] = 0.2,
    dual_clip: Annotated[float, CODE] = 10.0,
    extreme: Annotated[NonNegative, CODE] = 5.0,
    dynamic_sampling: Annotated[bool, CODE] = True,
    rounds: Annotated[Count, CODE] = 16,
    accuracy: Annotated[str | None, OURS] = None,
    tau: Annotated[float, CODE] = 0.05,
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
    (`rewards.shaping.soft_overlong_penalty`).

    The released code divides by min z rather than |min z|, so that its branches for h < 0 are never taken. H is that of
    the sampling policy (code: of the current one, per mini-batch).

    Rollout: each token is drawn at T = T0 (1 + tau clip(h, -1, 1)), T0 the run's temperature, h of its entropy at T0
    on the scale of the last batch (`rollouts.heated`); T0 before the first update. Ratios are of the policies at these
    temperatures, each policy with its own entropy.
    """
    check_number("pivot", pivot, least=0, most=1)
    check_number("tau", tau, least=0, below=1)
    check_number("rounds", rounds, least=1)
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
