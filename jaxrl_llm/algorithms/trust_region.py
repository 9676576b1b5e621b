"""Methods that limit the step: by adaptive bounds, by a regression, by curvature."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.returns import whiten_advantages
from jaxrl_llm.algorithms.presets import presets
from jaxrl_llm.algorithms.run_settings import run_settings, several_steps
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import Estimator, Scale
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.reference import reset_at
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories, row_means, totals_of
from jaxrl_llm.core.transform import chain, controller
from jaxrl_llm.objectives import (
    clip,
    constant,
    entropy,
    kl,
    policy_gradient,
    token_mean,
    token_ratio,
    unclipped,
)
from jaxrl_llm.objectives.anchors import centred_clip, mirror_step, mix_anchors, mixed_anchor
from jaxrl_llm.objectives.clips.adaptive_clip import controlled_clip, find_bounds
from jaxrl_llm.objectives.curvature import keep_small_steps
from jaxrl_llm.objectives.penalties import ratio_variance
from jaxrl_llm.objectives.regression import aim_at_bounds, toward_ratio
from jaxrl_llm.replay.base import times_as_many, whole_groups
from jaxrl_llm.utils.errors import require_choice

__all__ = [
    "bapo_adaptive_clip",
    "capo_curvature",
    "gbpo",
    "mdpo_mirror_descent",
    "r2vpo",
    "remix",
]


@presets(
    paper={"target": 0.4, "low_end": 0.9, "low_step": 0.02, "high_end": 3.0,
           "order": "high_first", "criterion": "share", "weighted": True, "dual_clip": None},
    code={"target": 1.0, "low_end": 0.8, "low_step": 0.05, "high_end": 2.0,
          "order": "low_first", "criterion": "ratio", "weighted": False, "dual_clip": 3.0},
)  # fmt: skip
def bapo_adaptive_clip(
    target: float = 0.4,
    low_start: float = 0.6,
    low_end: float = 0.9,
    low_step: float = 0.02,
    high_start: float = 1.2,
    high_end: float = 3.0,
    high_step: float = 0.05,
    order: Literal["high_first", "low_first"] = "high_first",
    criterion: Literal["ratio", "share"] = "share",
    statistic: Literal["gradient", "value"] = "value",
    weighted: bool = True,
    dual_clip: float | None = None,
) -> Algorithm:
    """Balanced Policy Optimization with Adaptive Clipping (BAPO, arXiv 2510.18927, 2025).

    loss = token mean of -min(rho A, clip(rho, c_low, c_high) A), with ratio bounds searched at each gradient step: from
    low_start and high_start up, in steps of low_step and high_step, to at most low_end and high_end, until the tokens
    with A > 0 contribute a share of at least `target` to sum q |min(rho A, clip(rho, c_low, c_high) A)|, q the token's
    probability under the behaviour policy. A is GRPO's.

    Where the paper (v1, section 5.1 and algorithm 1; the defaults) and the released code (preset "code") differ: order
    "high_first" raises c_high to its end, then c_low by one step; the code's "low_first" raises c_low to its end, then
    c_high. The code's criterion is "ratio", of positive to negative contributions, without q (weighted False), with
    target 1, bounds 0.6 to 0.8 and 1.2 to 2, and both steps 0.05; its README gives the paper's target as 0.5. Only the
    code bounds the loss of bad actions by dual_clip |A|, with dual_clip = 3 (None: no bound).

    With statistic "value", the formula of both, raising c_low increases the contribution of bad tokens, away from the
    target, so only c_high helps. "gradient" counts rho |A| of the tokens that are not clipped, which matches the
    paper's stated purpose.

    Defaults. Paper: target, low_start, low_end, low_step, high_start, high_end, high_step, order, criterion,
    statistic, weighted, dual_clip.
    """
    rho = token_ratio()
    bounds = (low_start, low_end, low_step), (high_start, high_end, high_step)
    search = find_bounds(rho, target, *bounds, order, criterion, statistic, weighted)
    return Algorithm(group_relative(), policy_gradient(rho, controlled_clip(dual_clip), token_mean(), refresh=search))


@run_settings(several_steps("several gradient steps on a batch, towards ratios away from 1", 5))
def gbpo(
    low: float = 0.3, high: float = 0.3, temperature: float = 1e-4, ddof: int = 1, epsilon: float = 1e-6
) -> Algorithm:
    """Group-relative Bounded Policy Optimization (Bounded Ratio RL, arXiv 2604.18578, 2026).

    Regresses the ratio onto the optimum within bounds, 1 + high above the group's median and 1 - low below it:

        loss = token mean of |(rho - target) A|,  target = 1 - low + (low + high) sigmoid(z)
        A = (r - mean_g) / (std_g + epsilon),  z = (r - median_g) / (std_g + epsilon) / temperature

    Defaults are those of the code's README (its YAML has low = high = 0.2 and temperature 1). With binary rewards only
    the ratios of the minority outcome move away from 1, unless a group is split evenly; the others are at the median,
    with target 1, whose gradient is 0 at the first update of a batch: rho = pi/pi_old. A group of one has A = 0 (the
    code: about r). Intended for several epochs per batch.

    Defaults. Code: low, high, temperature, ddof, epsilon.
    """
    check_number("temperature", temperature, above=0)
    objective = policy_gradient(token_ratio("old"), toward_ratio("ratio_target"), token_mean())
    transform = chain(group_relative(ddof=ddof, epsilon=epsilon), aim_at_bounds(low, high, temperature, ddof, epsilon))
    return Algorithm(transform, objective)


@part
def dual_ascent(rate: float) -> Callable[[jax.Array, dict[str, jax.Array]], jax.Array]:
    """A function `(value, feedback) -> f32[]`: the multiplier after one step of `r2vpo`."""

    def ascend(value: jax.Array, feedback: dict[str, jax.Array]) -> jax.Array:
        return jnp.maximum(0.0, value + rate * feedback["ratio/excess"])

    return ascend


def r2vpo(
    variance_limit: float = 0.02,
    multiplier: float = 0.04,
    multiplier_rate: float = 0.1,
    replay_share: float = 1.0,
    replay_age: int = 4,
    replay_groups: int = 1024,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Ratio-Variance Regularized Policy Optimization (R2VPO, arXiv 2601.03320, 2026).

    max E[rho A] subject to E[(rho - 1)^2] <= delta, by a Lagrange multiplier and without a clip; E is a token mean:

        loss = -E[rho A] + lambda (E[(rho - 1)^2] - delta),  lambda <- max(0, lambda + eta (E[(rho - 1)^2] - delta))

    delta = variance_limit; lambda starts at `multiplier` (a re-implementation keeps it constant) and is updated after
    each update of the policy with eta = multiplier_rate (0: constant). The full paper was not available to us; the dual
    update is the standard one for this constraint. A is GRPO's, with ddof and epsilon.

    round(replay_share m) groups of at most replay_age steps before, whole and each at most once, join the m groups of a
    step; replay_share 0 is the on-policy form. The store has the newest replay_groups groups with different rewards.
    Replayed tokens have the log-probabilities of the policy that sampled them, so the penalty down-weights stale ones.

    Defaults. Code: multiplier. Ours: variance_limit, multiplier_rate, replay_share, replay_age, replay_groups, ddof,
    epsilon.
    """
    check_number("variance_limit", variance_limit, least=0)
    check_number("multiplier", multiplier, least=0)

    objective = policy_gradient(token_ratio(), unclipped(), token_mean())
    transform = chain(
        group_relative(ddof=ddof, epsilon=epsilon),
        controller("variance_multiplier", multiplier, dual_ascent(multiplier_rate)),
    )
    replay = whole_groups(replay_share, groups=replay_groups, max_age=replay_age) if replay_share else None
    return Algorithm(transform, objective + "variance_multiplier" * ratio_variance(variance_limit), replay=replay)


@run_settings(several_steps("several gradient steps on a batch: at the first its divergence has no gradient", 4))
def mdpo_mirror_descent(
    step_size: float = 1.0, total_steps: float | None = None, estimator: Estimator = "k3", epsilon: float = 1e-8
) -> Algorithm:
    """Mirror Descent Policy Optimization (MDPO, arXiv 2005.09814, 2020).

    Several gradient steps per batch on the policy gradient with an explicit KL to the policy of the batch, no clip:

        loss = token mean of -rho A + (1/t_k) KL(pi || pi_k),  t_k = step_size (1 - k / total_steps), k = 0, 1, ...

    The KL is estimated from the samples of pi_k and differentiated through rho, by the estimator "k3",
    rho log rho - rho + 1, or "k1", rho log rho. They agree in expectation, but the gradient of k1 at pi_k is that of
    log pi: zero-mean noise, 1/t_k times the gradient for an advantage of 1. total_steps: iterations of the run; None:
    t_k is step_size. In place of the paper's critic, A is the reward minus the group's mean, standardised over the
    batch with epsilon under the root. t_0 is step_size; the released code starts one step higher, at 1 + 1/K.

    Defaults. Code: step_size. Ours: estimator, epsilon. Run: total_steps.
    """
    proximity = "proximity" * kl("behaviour", estimator, sampled="behaviour")
    transform = chain(group_relative("none"), whiten_advantages(epsilon=epsilon), mirror_step(total_steps, step_size))
    return Algorithm(transform, policy_gradient(token_ratio(), unclipped(), token_mean()) + proximity)


def remix(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.001,
    entropy_coefficient: float = 0.0,
    hold: float = 50,
    every: float = 10,
    drop: float = 0.1,
    least: float = 0.5,
    past_share: float = 0.4,
    replay_age: int = 2,
    switch: int = 50,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Reincarnating Mix-policy Proximal Policy Gradient (ReMix, arXiv 2507.06892, 2025).

    Batches of the first steps mix rollouts of the last few policies with fresh ones. c = pi_old / pi_behaviour centres
    the clip, and there are two anchors, the reference and the policy before the last update:

        loss = -token mean of min(rho A, clip(rho, c - clip_low, c + clip_high) A) - entropy_coefficient H
               + kl_coefficient [lambda k3(pi, reference) + (1 - lambda) k3(pi, previous)]
        lambda(t) = max(1 - drop ceil(max(t - hold, 0) / every), least)  in iteration t = 1, 2, ...

    rho is relative to the behaviour policy; c = 1 for fresh rollouts. A is GRPO's, with ddof and epsilon. At first
    `previous` has the initial weights; it is a further copy of what learns. The sources available to us print no
    coefficients, estimator or clip range.

    The first `switch` iterations: past_share of the groups of a batch come from the last replay_age steps, whole, each
    at most once; they join the fresh ones. Groups with equal rewards are not replayed. After them (the paper: 50 or
    100) all groups are fresh, so that the loss is PPO's clipped one, and the reference is no longer the initial policy
    but that of the switch. lambda goes on by its schedule, which the paper does not restart. The passes over each batch
    are the run's: two in the paper's first phase (--epochs 2), which here the second phase has as well.

    Defaults. Paper: hold, every, drop, least, past_share, replay_age, switch. Ours: clip_low, clip_high,
    kl_coefficient, entropy_coefficient, ddof, epsilon.
    """
    objective = policy_gradient(token_ratio(), centred_clip(clip_low, clip_high), token_mean(), needs={"old_logp"})
    objective -= entropy_coefficient * entropy()
    objective += kl_coefficient * mixed_anchor("k3")
    check_number("past_share", past_share, least=0, below=1)
    check_number("switch", switch, least=0, whole=True)
    ratio = times_as_many(past_share / (1 - past_share))
    replay = whole_groups(**ratio, max_age=replay_age, until=switch) if past_share else None
    transform = chain(group_relative(ddof=ddof, epsilon=epsilon), mix_anchors(hold, every, drop, least))
    return Algorithm(transform, objective, replay=replay, reference=reset_at(switch))


def kept_mean(values: jax.Array, batch: Trajectories) -> jax.Array:
    """Mean over all sequences of the mean over their kept tokens; 0 for a sequence without one."""
    return jnp.sum(row_means(values, batch)) / totals_of(batch)["rows"]


def capo_curvature(
    change_limit: float = 0.01,
    kl_limit: float = 1e-4,
    symmetric: bool = True,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    average: Literal["sequence", "constant"] = "sequence",
    scale: Scale = "none",
    learning_rate: float | None = None,
    max_length: float | None = None,
) -> Algorithm:
    """Curvature-Aware Policy Optimization (CAPO, arXiv 2510.00819, 2025).

    Masks tokens whose own gradient step, in a second-order model of the last layer, would change the objective or the
    policy too much. A token is kept where |m_H| < change_limit (symmetric; else 0 <= m_H < change_limit) and
    m_F < kl_limit, with

        m_H = lr <g, G> + lr^2/2 H,  m_F = lr^2/2 (v.u)^2;  see `objectives.curvature`

    A limit of 0 is off. The rest is GRPO with A = r - mean_g (scale "std" divides by the deviation), clip_low,
    clip_high and no KL. average "sequence": mean over all sequences of the mean over their kept tokens; "constant":
    divides each sequence by max_length (4096 where None), as in Dr. GRPO, for which the paper has kl_limit 1e-3 or 1e-2
    and change_limit 5e-4.

    Here G = g, a plain gradient step with learning_rate (the paper's 1.5e-5 where None), which has a closed form
    without full distributions. The paper models Adam's step.

    Defaults. Paper: change_limit, kl_limit, symmetric, average. Code: clip_low, clip_high, scale.
    Run: learning_rate, max_length.
    """
    require_choice("average", average, ("sequence", "constant"))
    rate, longest = 1.5e-5 if learning_rate is None else learning_rate, 4096 if max_length is None else max_length

    transform = chain(group_relative(scale), keep_small_steps(rate, change_limit, kl_limit, symmetric))
    mean = kept_mean if average == "sequence" else constant(longest)
    return Algorithm(transform, policy_gradient(token_ratio(), clip(clip_low, clip_high), mean))
