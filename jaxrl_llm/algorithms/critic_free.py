"""PPO's clipped loss without a critic: the baseline is of the group, the batch, or earlier samples of the prompt."""

from __future__ import annotations

from typing import Literal

from jaxrl_llm.advantages.group import drop_small_advantages, group_relative
from jaxrl_llm.advantages.returns import discounted_returns, whiten_advantages
from jaxrl_llm.advantages.trackers import tracked_baseline
from jaxrl_llm.algorithms.run_settings import epochs_at_least, one_sample, run_settings
from jaxrl_llm.algorithms.score_function import with_kl_reward
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import Scale, Span
from jaxrl_llm.core.transform import chain
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.trackers import tracked_uncertainty
from jaxrl_llm.objectives import clip, kl, policy_gradient, sequence_mean, span_ratio, token_mean, token_ratio
from jaxrl_llm.replay.drift_probe import last_responses
from jaxrl_llm.rollouts.programs import group, with_start_value
from jaxrl_llm.utils.errors import require_choice

__all__ = ["loop", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "spo_single_stream"]


def reinforce_plus_plus(
    kl_coefficient: float = 0.001, gamma: float = 1.0, clip_low: float = 0.2, clip_high: float = 0.2
) -> Algorithm:
    """REINFORCE++ (Critic-Free Policy Optimization with Global Advantage Normalization, arXiv 2501.03262, 2025).

    PPO without a critic; advantages are standardised over the batch rather than the prompt's group, so that one
    response per prompt is enough.

        r_t = r 1[t last] - kl_coefficient (logp_behaviour - logp_ref)_t,    G_t = r_t + gamma G_{t+1}
        A_t = (G_t - mean) / sqrt(var + 1e-8)  over all tokens of the batch

    in PPO's clipped loss (clip_low, clip_high), mean over tokens. gamma: discount per token of the policy; returns pass
    through tokens of the environment unchanged.

    Defaults. Paper: gamma, clip_low, clip_high. Code: kl_coefficient.
    """
    transform = with_kl_reward(kl_coefficient, discounted_returns(gamma), whiten_advantages(over="tokens"))
    return Algorithm(transform, policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean()))


def reinforce_plus_plus_baseline(
    kl_coefficient: float = 0.001,
    over: Literal["sequences", "tokens"] = "sequences",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    epsilon: float = 1e-8,
) -> Algorithm:
    """REINFORCE++ with a group baseline (REINFORCE++, arXiv 2501.03262, 2025).

    GRPO with the standard deviation of the batch in place of the group's, which is not biased by difficulty:

        A'_i = r_i - mean_g,    A_i = (A'_i - mean A') / sqrt(var A' + epsilon)

    in PPO's clipped loss (clip_low, clip_high), mean over tokens, plus kl_coefficient times 1/2 (logp - logp_ref)^2.
    over: "sequences" takes mean and std over responses, as in the paper; "tokens" over their tokens, as in verl, so
    that longer responses have more weight and a prompt's advantages no longer have mean 0. The paper divides by
    std + epsilon.

    Defaults. Paper: over, clip_low, clip_high. Code: epsilon. Ours: kl_coefficient.
    """
    average = token_mean()
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), average)
    objective += kl_coefficient * kl(to="reference", estimator="k2", average=average)
    return Algorithm(chain(group_relative("none"), whiten_advantages(over, epsilon=epsilon)), objective)


@run_settings(epochs_at_least(2, "two passes over a batch, without which it is RLOO"))
def loop(
    clip_range: float = 0.1,
    bounds: Literal["paper", "reciprocal"] = "paper",
    span: Span = "token",
    least_advantage: float = 0.01,
    scale: Scale = "none",
    epsilon: float = 1e-6,
) -> Algorithm:
    """Leave-One-Out PPO (LOOP: RL for Long-Horizon Interactive LLM Agents, arXiv 2502.01600, 2025).

    PPO without a critic for agents, with a leave-one-out baseline and several epochs over each batch:

        A_k = R_k - 1/(K-1) sum_{j != k} R_j,    loss = -mean_k mean_t min(rho A_k, clip(rho, low, 1 + e) A_k)

    e = clip_range; low is 1 - e (bounds "paper") or 1 / (1 + e) ("reciprocal", the code's, so that e may be above 1).
    span of the ratio: "token", "turn" or "sequence", the latter two as products. Rows with |A| < least_advantage are
    dropped. scale "std" divides by the group's deviation + epsilon (worse in the paper). No KL, no reference policy.

    Defaults. Paper: clip_range, bounds, span, scale. Code: least_advantage. Ours: epsilon.
    """
    require_choice("bounds", bounds, ("paper", "reciprocal"))
    low = clip_range if bounds == "paper" else clip_range / (1 + clip_range)
    credit = group_relative(scale, epsilon=epsilon, baseline="leave_one_out")
    ratio = span_ratio(span, mean=False)
    objective = policy_gradient(ratio, clip(low, clip_range), sequence_mean())
    return Algorithm(chain(credit, drop_small_advantages(least_advantage)), objective)


@run_settings(one_sample("one response to each prompt, whose baseline is the prompt's own history"))
def spo_single_stream(
    half_life: float = 0.06,
    least_kept: float = 0.875,
    most_kept: float = 0.96,
    prompts: int | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    epsilon: float = 1e-8,
    least_weight: float = 0.05,
    stored: int = 16384,
    profile: str = "",
    profile_samples: int = 8,
) -> Algorithm:
    """Single-stream Policy Optimization (SPO, arXiv 2509.13232, 2025).

    No groups: the baseline is a tracker's estimate for the prompt, and advantages are standardised over the batch.

        A = r - v(x),    A <- (A - mean) / (std + epsilon),    and then the tracker is updated,
        alpha <- k alpha + r,    beta <- k beta + 1 - r,    v = alpha / (alpha + beta)
        k = clip(2^(-D / half_life), least_kept, most_kept)

    in PPO's clipped loss (clip_low, clip_high), mean over tokens. D is how far the policy moved since it last answered
    x: the mean over the tokens of that response of |log pi_now - log pi_then|, both before the update of their step, by
    the learner; 0 at the first visit. (The code has both after it.) The run keeps the last responses of `stored`
    prompts, and the forward pass before an update reads those of the batch's prompts; no gradient step does. Where a
    response is no longer kept, k = least_kept.

    Prompts are drawn without replacement in proportion to sqrt(v (1 - v)) + least_weight. Trackers start at v = 0.5
    with the weight of one observation; or, with the column `profile` of the data set, which has the mean reward of
    profile_samples samples of each prompt before training, at v = (n mean + 1/2)/(n + 1) with the weight
    1/(1 - least_kept). prompts: size of the tracker (None: one entry for each prompt of the run); prompt ids beyond it
    share entries. Several responses to a prompt are one update. The run's group_size should be 1.

    Defaults. Paper: half_life, least_kept, most_kept, clip_low, clip_high, epsilon, profile_samples. Code:
    least_weight. Ours: stored, profile. Run: prompts.
    """
    column, offline = profile or None, profile_samples if profile else 0
    rule = tracked_uncertainty(least_weight, half_life, least_kept, most_kept, column, profile_samples)
    transform = tracked_baseline(prompts, half_life, least_kept, most_kept, epsilon, offline)
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean())
    return Algorithm(
        transform, objective, curriculum=choose_prompts(rule), replay=last_responses(stored),
        rollout=with_start_value(group(), profile) if profile else None,
    )  # fmt: skip
