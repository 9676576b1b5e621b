"""Off-policy score functions and regressions on the log-probability, without the gradient of a ratio."""

from __future__ import annotations

from typing import Literal

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.balance import balanced_relative
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import Clipping, Scale
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.objectives import kl, log_probability, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.penalties import imitation
from jaxrl_llm.objectives.regression import masked_score, random_policy_regression
from jaxrl_llm.utils.errors import is_off, require_choice

__all__ = ["asymre", "opmd", "rec_off_policy_reinforce", "rover"]


def rec_off_policy_reinforce(
    clip: Clipping = "one-side",
    weight: Literal["advantage", "importance", "none"] = "none",
    regulariser: Literal["none", "forward-kl", "k2"] = "none",
    drop: Literal["none", "balance"] = "none",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    far_low: float = 0.6,
    far_high: float = 2.0,
    temperature: float = 1.0,
    coefficient: float = 0.1,
    scale: Scale = "none",
    epsilon: float = 1e-6,
) -> Algorithm:
    """REC/REP/RED: off-policy REINFORCE (Group-Relative REINFORCE Is Off-Policy, arXiv 2509.24203, 2025).

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

    Defaults. Paper: clip, weight, regulariser, drop, scale. Code: clip_low, clip_high, far_low, far_high, temperature,
    coefficient, epsilon.
    """
    require_choice("regulariser", regulariser, ("none", "forward-kl", "k2"))
    require_choice("drop", drop, ("none", "balance"))
    score = masked_score(clip, weight, clip_low, clip_high, far_low, far_high, temperature)
    objective = policy_gradient(token_ratio(), log_probability(score), token_mean())
    if regulariser != "none" and not is_off(coefficient):
        # 2 c k2 = c l^2
        objective += coefficient * (imitation() if regulariser == "forward-kl" else 2.0 * kl("behaviour", "k2"))
    advantages = balanced_relative if drop == "balance" else group_relative
    return Algorithm(advantages(scale, ddof=0, epsilon=epsilon), objective)


def opmd(coefficient: float = 0.1, scale: Scale = "none") -> Algorithm:
    """Online Policy Mirror Descent (Kimi k1.5, arXiv 2501.12599, 2025), as a member of REC (arXiv 2509.24203).

    loss = token mean of -A log pi + c (log pi - log pi_behaviour)^2, A = r - mean_g, c = coefficient. No ratio, no
    clip: the square keeps the policy near the behaviour policy. scale "std" divides A by the population standard
    deviation. Kimi k1.5 squares the log-ratio of the whole sequence, with a weight tau/2 that it does not print; REC
    squares that of each token.

    Defaults. Paper: scale. Code: coefficient.
    """
    return rec_off_policy_reinforce(clip="none", regulariser="k2", coefficient=coefficient, scale=scale)


def asymre(coefficient: float = 0.1, scale: Scale = "none") -> Algorithm:
    """Asymmetric REINFORCE (arXiv 2506.20520, 2025), as a member of REC (arXiv 2509.24203).

    loss = -token mean of (A + c) log pi, A = r - mean_g: the baseline is lowered by c = coefficient > 0, so that
    off-policy good answers have more weight than bad ones. scale "std" divides A by the population standard deviation.

    Defaults. Paper: scale. Code: coefficient.
    """
    return rec_off_policy_reinforce(clip="none", regulariser="forward-kl", coefficient=coefficient, scale=scale)


def rover(ratio_scale: float = 1.0, next_scale: float = 1.0, scale: Scale = "none", epsilon: float = 1e-6) -> Algorithm:
    """Random Policy Valuation (ROVER, arXiv 2509.24981, 2025).

    With binary rewards at the end, acting greedily on the value of the uniform policy is optimal. The log-ratio is
    interpreted as that value and trained by one-step regression with a uniform backup:

        Q_t = rho_T (log pi - log pi_behaviour),  V_t = mean over the vocabulary of the same
        loss = token mean of (Q_t - sg(r_c + next_scale V_next(t)))^2,  r_c = r - mean_g

    rho_T = ratio_scale; V_next(t) is V at the row's next action, 0 after the last. scale "std" divides r_c by the
    group's standard deviation plus epsilon (the mathematics script). No clip, no KL. Groups of equal rewards still
    contribute. On-policy the first gradient is twice that of REINFORCE with the group's mean as baseline.

    Defaults. Paper: ratio_scale, next_scale, scale. Code: epsilon.
    """
    check_number("ratio_scale", ratio_scale, above=0)
    return Algorithm(group_relative(scale, epsilon=epsilon), random_policy_regression(ratio_scale, next_scale))
