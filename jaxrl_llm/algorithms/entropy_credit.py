"""Methods that assign credit by the policy's entropy: per token, or of the whole batch against a target."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import (
    drop_rows,
    drop_uniform_groups,
    group_relative,
    mixed_groups,
    on_actions,
    uniform_groups,
)
from jaxrl_llm.advantages.multi_reward import mixed_by, uniform_by
from jaxrl_llm.advantages.multipliers import (
    COMPOSITIONS,
    entropy_scaled,
    length_weighted_advantage,
    position_keys,
    regulated,
    revised,
    standard_scores,
)
from jaxrl_llm.advantages.returns import scored_actions
from jaxrl_llm.advantages.turns.turn_rewards import needs_turns
from jaxrl_llm.algorithms.presets import presets
from jaxrl_llm.core.algorithm import Algorithm, DynamicSampling
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.entropy_levels import ENTRIES, entropy_level, log_entropy_scale
from jaxrl_llm.core.log_ratios import log_ratio
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import chain, stateless
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.clips.token_clip import (
    Bounds,
    gradient_preserving_clip,
    level_bounds,
    redistributed,
    token_clip,
)
from jaxrl_llm.rollouts.agents.fork import by_chance, forking_agents
from jaxrl_llm.rollouts.heated import heated
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.utils.errors import require_choice

__all__ = [
    "aepo_agentic",
    "erpo_entropy_regulated",
    "hapo_heterogeneous",
]


@part
def scaled_by_entropy(strength: float, over: str, ddof: int, clamp: bool) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N, L]`: the advantages times 1 + strength z, see `aepo_agentic`."""

    def scaled(batch: Trajectories) -> jax.Array:
        keys = batch.group if over == "group" else jnp.zeros_like(batch.group)
        z = standard_scores(batch.need("entropy"), scored_actions(batch), keys, ddof, 0.0)
        return entropy_scaled(batch.need("advantages"), z, strength, clamp)

    return scaled


@presets(
    paper={"over": "group", "ddof": 0, "dual_clip": None},
    code={"over": "batch", "ddof": 1, "dual_clip": 3.0},
)
def aepo_agentic(
    strength: float = 0.2,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    over: Literal["group", "batch"] = "group",
    ddof: int = 0,
    clamp: bool = False,
    dual_clip: float | None = None,
    beta: float = 0.5,
    branches: int = 2,
    probability: float = 0.5,
    entropy_weight: float = 0.2,
    damping: float = 0.05,
    first_tokens: int = 20,
) -> Algorithm:
    """Agentic Entropy-Balanced Policy Optimization (AEPO, arXiv 2510.14545, 2025).

    Two changes of the update: credit grows with a token's entropy H, and the upper clip keeps a scaled gradient.

        A_t = A_grpo (1 + strength z_t),  z = (H - mean H) / std H
        loss = -mean over tokens of min(rho A, clip(rho, 1 - clip_low, (1 + clip_high) rho / sg(rho)) A)

    so that the gradient is F A grad log pi, F = 1 + clip_high where rho > 1 + clip_high and A > 0, 0 where
    rho < 1 - clip_low and A < 0, else rho. H is the entropy at sampling; its moments are over the tokens of the group.
    The released code takes those of the current policy over the tokens of the micro-batch: over "batch", ddof 1, and
    dual_clip 3 where A < 0 (preset "code"). clamp: no negative factor of A (z < -1 / strength). The paper's strength
    and clip range were not available to us; the range is DAPO's.

    Of the k episodes of a group m begin at the question. A first one, of these, is played to its end: with the entropy
    H_root of its first reply, H_tool the mean of its replies', and H_t that after an observation,

        m = floor(k sigmoid(beta (H_root - H_tool))) + 1, at most k
        fork if clip((u + entropy_weight (H_t - H_root)) max(0, 1 - damping l), 0, 1) >= 1 - probability,  u ~ U(0, 1)

    `branches` - 1 times after each reply to an observation, until there are k; l counts the rounds before in which the
    group forked. H is the sum over the first `first_tokens` tokens / log |V| (the code: of the parts that the ten most
    probable tokens have). Missing episodes begin at the question. Rollout: `rollouts.agents.fork`.

    Defaults. Paper: over, clamp, dual_clip. Code: strength, beta, branches, probability, entropy_weight, damping,
    first_tokens. Ours: clip_low, clip_high, ddof.
    """
    require_choice("over", over, ("group", "batch"))

    surrogate = gradient_preserving_clip(clip_low, clip_high, dual_clip)
    objective = policy_gradient(token_ratio(), surrogate, token_mean())
    forks = by_chance(probability, entropy_weight, damping)
    return Algorithm(
        chain(needs_turns(), group_relative(), revised(scaled_by_entropy(strength, over, ddof, clamp))),
        objective,
        rollout=forking_agents(forks, None, branches, first_tokens, beta, summed=True),
    )


@part
def regulated_by_progress(
    gamma: float, eta: float, beta: float, buckets: int, compose: Literal["additive", "multiplicative"], epsilon: float
) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N, L]`: the advantages of `erpo_entropy_regulated`, from those of the group."""

    def progressed(batch: Trajectories) -> jax.Array:
        mask = scored_actions(batch)
        W = jax.nn.sigmoid(gamma * standard_scores(batch.need("entropy"), mask, batch.group, epsilon=epsilon))
        s = beta * log_ratio(batch.behaviour_logp, batch.need("reference_logp"), mask)
        keys = position_keys(batch.group, batch.action_index, batch.lengths, buckets)
        s = standard_scores(s, mask, keys, epsilon=epsilon)
        return regulated(batch.need("advantages"), W, s, mask, eta, compose)

    return progressed


def erpo_entropy_regulated(
    gamma: float = 5.0,
    eta: float = 0.2,
    beta: float = 0.1,
    buckets: int = 10,
    compose: Literal["additive", "multiplicative"] = "additive",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    epsilon: float = 1e-8,
) -> Algorithm:
    """Token-Level Entropy-Regulated Policy Optimization (ERPO, arXiv 2603.28204, 2026).

    Adds a progress signal, the log-ratio to the reference policy, standardised among tokens at the same relative
    position and gated by entropy H. With moments over the tokens of a group (population standard deviation)

        s = beta (logp - logp_ref);  s~ = (s - mean_k) / (std_k + epsilon),  k = min(floor(buckets t / T), buckets - 1)
        W = sigmoid(gamma (H - mean) / (std + epsilon))
        A_t = A_grpo + eta W s~ sign(A_grpo)                             compose "additive"
        A_t = T A_grpo W / sum W + eta s~ sign(A_grpo)                   compose "multiplicative" (a re-implementation)

    logp is that of the sampling policy. Groups of equal rewards are dropped. The paper's average was not available to
    us: a token mean, with PPO's clip (clip_low, clip_high). beta cancels in s~ except through epsilon. The authors
    released no code; "code" below is that re-implementation.

    Defaults. Paper: compose, epsilon. Code: gamma, eta, beta, buckets. Ours: clip_low, clip_high.
    """
    check_number("gamma", gamma, least=0)
    check_number("buckets", buckets, least=1)
    require_choice("compose", compose, COMPOSITIONS)

    return Algorithm(
        transform=chain(
            group_relative(),
            revised(regulated_by_progress(gamma, eta, beta, buckets, compose, epsilon), {"reference_logp"}),
            drop_uniform_groups(),
        ),
        objective=policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean()),
    )


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


def hapo_heterogeneous(
    pivot: float = 0.8,
    advantage_strength: float = 1.0,
    clip_strength: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 10.0,
    extreme: float = 5.0,
    dynamic_sampling: bool = True,
    rounds: int = 16,
    accuracy: str | None = None,
    tau: float = 0.05,
) -> Algorithm:
    """Heterogeneous Adaptive Policy Optimization (HAPO, arXiv 2509.16591, 2025).

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

    Defaults. Code: pivot, advantage_strength, clip_strength, clip_low, clip_high, dual_clip, extreme, dynamic_sampling,
    rounds, tau. Ours: accuracy.
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
