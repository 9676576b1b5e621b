"""PPO and its variants: methods with a learnt critic.

All of them need "values": a policy with a critic (`models.critic`) that is trained in the same update as the policy.
"""

from __future__ import annotations

from typing import Literal

import jax

from jaxrl_llm.advantages.demonstrations import demonstrated_rows, demonstrations_apart
from jaxrl_llm.advantages.kl_rewards import adaptive_kl, kl_reward
from jaxrl_llm.advantages.normalisation import normalised_values, running_reward_scaling
from jaxrl_llm.advantages.returns import clip_advantages, generalised_advantages, sequence_values, whiten_advantages
from jaxrl_llm.algorithms.presets import presets
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import Estimator
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import Objective, Transform, chain
from jaxrl_llm.objectives import clip, entropy, kl, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.averaging.subset import count_tokens, mean_by, mean_over
from jaxrl_llm.objectives.penalties import imitation
from jaxrl_llm.objectives.thresholds import distance, kl_threshold, threshold_penalty
from jaxrl_llm.objectives.values import huber, last_action_mean, soft_minimum, value_loss
from jaxrl_llm.rollouts.guidance.demonstrated import with_demonstration
from jaxrl_llm.rollouts.programs import group
from jaxrl_llm.utils.errors import is_off, require_choice

__all__ = ["ppo", "ppo_max", "safe_entropy_aware"]


def clipped_policy(low: float, high: float, dual: float | None = None) -> Objective:
    """PPO's clipped surrogate of token ratios, averaged over the batch's tokens; `low`, `high`, `dual` as in `clip`."""
    return policy_gradient(token_ratio(), clip(low, high, dual), token_mean())


def sampled_rows(batch: Trajectories) -> jax.Array:
    """bool[N]: the rows that the policy sampled, and no texts of the data set."""
    return ~demonstrated_rows(batch)


def chain_present(*parts: Transform | None) -> Transform:
    """Chain the transforms that are not None."""
    return chain(*(part for part in parts if part is not None))


def ppo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    value_clip: float | None = 0.2,
    value_coefficient: float = 1.0,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = True,
    normalise_returns: bool = False,
    kl_coefficient: float = 0.05,
    kl_in: Literal["reward", "loss"] = "reward",
    kl_estimator: Estimator | None = None,
    kl_target: float | None = None,
    kl_horizon: float = 10000.0,
    entropy_coefficient: float = 0.0,
) -> Algorithm:
    """Proximal Policy Optimization (PPO, arXiv 1707.06347, 2017).

    A clipped surrogate with a learnt critic V. With r_t the rewards of the actions (the score is added to the last),

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1},    R_t = A_t + V_t
        loss = -mean_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
               + value_coefficient/2 mean_t max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2)

    with means over the tokens of the batch, V_old the critic before the update, and V = 0 after the last action. whiten
    standardises A over the batch (unbiased variance), after R is computed. dual_clip c > 1 bounds the loss of a bad
    action by -c A (1912.09729; verl: 3). entropy_coefficient: entropy bonus. normalise_returns: the critic predicts
    (R - mean) / std with the moments of all earlier batches, for rewards of any scale.

    The paper has neither a value clip nor a reference policy, and its value loss has no factor 1/2. kl_coefficient beta
    (0: none) adds -beta k to each action's reward (kl_in "reward", with k of the sampling policy and kl_estimator "k1"
    unless given), or beta mean_t k to the loss (kl_in "loss", with k of the current policy and "k2", whose gradient is
    that of the divergence). With a kl_target beta is adaptive (1909.08593):
    beta <- beta (1 + clip(KL / kl_target - 1, -0.2, 0.2) n / kl_horizon) for batches of n rows.

    Other settings. Paper, for control: gamma 0.99. verl: lam 1, value_clip 0.5, kl_coefficient 0.001, dual_clip 3. TRL:
    value_coefficient 0.1. Under Adam a critic with weights of its own is insensitive to value_coefficient.

    Defaults. Paper: clip_low, clip_high, dual_clip, lam. Code: value_clip, value_coefficient, gamma, whiten,
    kl_coefficient, kl_in, kl_horizon, entropy_coefficient. Ours: normalise_returns, kl_estimator, kl_target.
    """
    require_choice("kl_in", kl_in, ("reward", "loss"))
    beta = kl_coefficient if kl_target is None else "kl_coefficient"
    rewarded = kl_in == "reward" and not is_off(beta)
    credit = generalised_advantages(gamma, lam)
    transform = chain_present(
        None if kl_target is None else adaptive_kl(kl_coefficient, kl_target, kl_horizon),
        kl_reward(beta, kl_estimator or "k1") if rewarded else None,
        normalised_values(credit) if normalise_returns else credit,
        whiten_advantages() if whiten else None,
    )
    objective = clipped_policy(clip_low, clip_high, dual_clip) + value_coefficient * value_loss(value_clip)
    objective += (beta if kl_in == "loss" else 0.0) * kl(estimator=kl_estimator or "k2")
    return Algorithm(transform, objective - entropy_coefficient * entropy())


@presets(
    paper={"kl_coefficient": 0.05, "reward_scaling": "normalise", "reward_clip": 0.3},
    code={"kl_coefficient": 0.01, "reward_scaling": "scale", "reward_clip": None},
)
def ppo_max(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    value_clip: float | None = 0.2,
    value_coefficient: float = 1.0,
    gamma: float = 1.0,
    lam: float = 0.95,
    kl_coefficient: float = 0.05,
    reward_scaling: Literal["scale", "normalise", "none"] = "normalise",
    reward_clip: float | None = 0.3,
    whiten: bool = False,
    advantage_clip: float | None = None,
    entropy_weight: float = 0.0,
    entropy_target: float = 35.0,
    pretraining_coefficient: float = 0.0,
    column: str = "answer",
) -> Algorithm:
    """PPO-max (Secrets of RLHF in Large Language Models Part I: PPO, arXiv 2307.04964, 2023).

    `ppo` with the choices that the authors found to stabilise it (section 5.4). Scores are normalised by their running
    mean and standard deviation over all batches so far, including this one, and clipped (eq. 18); then each action is
    penalised for its log-ratio to the reference policy:

        r <- clip((r - mean) / std, -reward_clip, reward_clip)
        r_t = r 1[t last] - kl_coefficient (logp_old - logp_ref)_t

    reward_scaling: "normalise" as above, "scale" divides by std only, "none" leaves scores as they are and does not
    clip them. The paper tries reward_clip 0.3 and 0.8. Advantages by `gae` with gamma and lam; whiten: standardised
    over the batch (released code: over the micro-batch), with 1e-6 added to the variance; advantage_clip bounds |A|.
    Clipped losses of policy and values with clip_low, clip_high, value_clip and value_coefficient as in `ppo`, plus
    entropy_weight times |mean entropy - entropy_target|: a target, not a bonus.

    The released scripts (preset "code") have reward_scaling "scale", reward_clip None, and kl_coefficient 0.01
    (English) or 0.1 (Chinese). The code has reward_clip 10 and advantage_clip 0.5 when these are on. The paper
    initialises the critic from the reward model and trains it before the policy (the run's `critic_steps`).

    pretraining_coefficient above 0 adds, to each group, the text in `column` of its row of the data set, which has no
    score and no advantage and counts in no other mean, and to the loss that coefficient times the mean of -log pi over
    the tokens of these texts.
    The paper takes texts of pretraining, without the prompts.

    Defaults. Code: clip_low, clip_high, value_clip, value_coefficient, gamma, lam, whiten, advantage_clip,
    entropy_weight, entropy_target, pretraining_coefficient. Ours: kl_coefficient, reward_scaling, reward_clip, column.
    """
    require_choice("reward_scaling", reward_scaling, ("scale", "normalise", "none"))
    texts = not is_off(pretraining_coefficient)
    transform = chain_present(
        demonstrations_apart() if texts else None,
        None if reward_scaling == "none" else running_reward_scaling(reward_scaling == "normalise", reward_clip),
        None if is_off(kl_coefficient) else kl_reward(kl_coefficient),
        generalised_advantages(gamma, lam),
        whiten_advantages(epsilon=1e-6) if whiten else None,
        None if advantage_clip is None else clip_advantages(advantage_clip),
        count_tokens(demonstrated_rows, "text_tokens") if texts else None,
        count_tokens(sampled_rows, "sampled_tokens") if texts else None,
    )
    average = mean_over(sampled_rows, "sampled_tokens") if texts else token_mean()
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), average)
    objective += value_coefficient * value_loss(value_clip, average)
    objective += entropy_weight * distance(entropy(average), entropy_target)
    if not texts:
        return Algorithm(transform, objective)
    objective += pretraining_coefficient * imitation(demonstrated_rows, mean_by("text_tokens"), "pretraining")
    return Algorithm(transform, objective, rollout=with_demonstration(group(), column))


def safe_entropy_aware(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    value_clip: float | None = 0.2,
    value_coefficient: float = 0.5,
    huber_width: float = 0.5,
    temperature: float = 0.3,
    entropy_coefficient: float = 0.01,
    threshold: float = 0.3,
    proportional: float = 0.3,
    integral: float = 0.01,
    derivative: float = 0.05,
    penalty_scale: float = 0.1,
    entropy_floor: float = 2.0,
    window: int = 50,
    penalty_gradient: bool = True,
) -> Algorithm:
    """Stable Alignment Finetuning with Entropy-aware predictive control (SAFE, arXiv 2602.04651, 2026).

    One value per row, at its last action, from two heads (the method needs "values:2"): their soft minimum

        V = -a (logsumexp(-v / a) - log 2),    a = temperature

    A = r - V, whitened over the rows, on all tokens of a row; the clipped loss of `ppo` (clip_low, clip_high), plus
    value_coefficient times the mean over rows of (h(V - r) + h(V_clipped - r)) / 2, with V_clipped within value_clip of
    V_old and h the Huber loss, x^2/2 up to |x| = huber_width and linear beyond; minus entropy_coefficient times the
    mean entropy; plus

        pen = penalty_scale (kl - thr)^2 max(0.5, entropy_floor / (H + 0.1))    where kl > thr, else 0

    with kl a moving average of log pi_old - log pi_ref, H the mean entropy at sampling, and thr = threshold adjusted by
    a PID controller on the growth of the reward (proportional, integral, derivative) and scaled by the phase of
    training that the last two windows of `window` batches show; see `objectives.thresholds`. The controller runs once
    per batch (released code: once per epoch over it).

    In the released code kl is a constant in pen, so that pen cannot move the policy. Here the value of the loss is the
    same, but with penalty_gradient its gradient is d pen / d kl times that of KL(pi || pi_ref), the evident intent;
    False is the released code. Values are read before the last action, as everywhere in this library, not after it:
    V knows the answer up to there, which is the paper's choice.

    Defaults. Code: clip_low, clip_high, value_clip, value_coefficient, huber_width, temperature, entropy_coefficient,
    threshold, proportional, integral, derivative, penalty_scale, entropy_floor, window. Ours: penalty_gradient.
    """
    gains, combine = (proportional, integral, derivative), soft_minimum(temperature)
    transform = chain(
        kl_threshold(threshold, gains, penalty_scale, entropy_floor, window),
        sequence_values(combine, heads=2),
        whiten_advantages("sequences"),
    )
    values = value_loss(value_clip, last_action_mean(), error=huber(huber_width), of="mean", combine=combine, heads=2)
    objective = clipped_policy(clip_low, clip_high) + value_coefficient * values + threshold_penalty(penalty_gradient)
    return Algorithm(transform, objective - entropy_coefficient * entropy())
