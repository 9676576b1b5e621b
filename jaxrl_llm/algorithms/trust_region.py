"""Methods that differ in how far a step may go: by covariance, by found bounds, by a regression, by curvature."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.advantages.returns import whiten_advantages
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.coefficients import check_number
from jaxrl_llm.errors import require_choice
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
from jaxrl_llm.objectives.adaptive_clip import controlled_clip, find_bounds
from jaxrl_llm.objectives.anchors import centred_clip, mirror_step, mix_anchors, mixed_anchor
from jaxrl_llm.objectives.covariance import (
    clip_and_detach,
    count_batches,
    draw_covariant,
    mark_covariant,
    penalise_covariant,
)
from jaxrl_llm.objectives.curvature import keep_small_steps
from jaxrl_llm.objectives.penalties import ratio_variance
from jaxrl_llm.objectives.regression import aim_at_bounds, toward_ratio
from jaxrl_llm.trajectory import Trajectories, row_means, totals_of
from jaxrl_llm.transform import chain, controller

__all__ = [
    "bapo_adaptive_clip",
    "capo_curvature",
    "clip_cov",
    "gbpo",
    "kl_cov",
    "mdpo_mirror_descent",
    "r2vpo",
    "remix",
]


def clip_cov(
    share: float = 2e-4,
    covariance_low: float = 1.0,
    covariance_high: float = 5.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Clip-Cov (The Entropy Mechanism of RL for Reasoning Language Models, arXiv 2505.22617, 2025).

    Entropy is lost by the covariance of log-probability and advantage, to which few tokens contribute most. With
    cov = (A - mean A)(log pi - mean log pi) over all n tokens, max(1, floor(share n)) tokens, drawn at random among
    those with covariance_low < cov < covariance_high that the clip leaves alone, get no loss:

        loss = token mean of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A), 0 for the tokens drawn

    A is GRPO's, with ddof and epsilon. The tokens drawn count in the mean. The covariance is of the whole batch of a
    gradient step at the current parameters (the released code: of a micro-batch).
    """
    rho = token_ratio()
    draw = draw_covariant(rho, covariance_low, covariance_high, share, clip_low, clip_high)
    objective = policy_gradient(rho, clip_and_detach(clip_low, clip_high), token_mean(), refresh=draw)
    return Algorithm(chain(group_relative("std", ddof, epsilon), count_batches()), objective)


def kl_cov(share: float = 2e-4, kl_coefficient: float = 1.0, ddof: int = 1, epsilon: float = 1e-6) -> Algorithm:
    """KL-Cov (The Entropy Mechanism of RL for Reasoning Language Models, arXiv 2505.22617, 2025).

    No clip: loss = token mean of -rho A, plus beta |log pi - log pi_behaviour| for the max(1, floor(share n)) of n
    tokens whose covariance (A - mean A)(log pi - mean log pi) in the batch is greatest. beta = kl_coefficient (verl's
    YAML has 0.1); share 2e-3 for the paper's 7B runs. A is GRPO's, with ddof and epsilon. At the first step the
    penalty has no gradient.
    """
    objective = policy_gradient(
        token_ratio(), penalise_covariant(kl_coefficient), token_mean(), refresh=mark_covariant(share)
    )
    return Algorithm(group_relative("std", ddof, epsilon), objective)


def bapo_adaptive_clip(
    target: float = 0.5,
    low_start: float = 0.6,
    low_end: float = 0.9,
    low_step: float = 0.05,
    high_start: float = 1.2,
    high_end: float = 3.0,
    high_step: float = 0.05,
    order: str = "high_first",
    criterion: str = "share",
    statistic: str = "value",
    weighted: bool = True,
    dual: float | None = 3.0,
) -> Algorithm:
    """Balanced Policy Optimization with Adaptive Clipping (BAPO, arXiv 2510.18927, 2025).

    loss = token mean of -min(rho A, clip(rho, c_low, c_high) A), at most dual |A| where A < 0, with bounds of the ratio
    searched at each step: from low_start, high_start up by low_step, high_step to at most low_end, high_end, until the
    tokens with A > 0 contribute a share `target` of sum q |min(rho A, clip(rho, c_low, c_high) A)|, q the probability
    when the token was drawn. Steps are not in the paper.

    Paper (default) and released code: order "high_first" (c_high as far as it goes, then c_low by one step) or
    "low_first" (c_low to its end, then c_high); criterion "share" or "ratio" (good over bad; code: target 1, bounds
    0.6 to 0.8 and 1.2 to 2); weighted by q, or not. With statistic "value", of paper and code, a higher c_low makes bad
    tokens count more, away from the target; "gradient" counts rho |A| of the tokens whose gradient the clip leaves,
    which is what the paper says the bounds are for. A is GRPO's.
    """
    rho = token_ratio()
    bounds = (low_start, low_end, low_step), (high_start, high_end, high_step)
    search = find_bounds(rho, target, *bounds, order, criterion, statistic, weighted)
    return Algorithm(group_relative(), policy_gradient(rho, controlled_clip(dual), token_mean(), refresh=search))


def gbpo(
    low: float = 0.3, high: float = 0.3, temperature: float = 1e-4, ddof: int = 1, epsilon: float = 1e-6
) -> Algorithm:
    """Group-relative Bounded Policy Optimization (Bounded Ratio RL, arXiv 2604.18578, 2026).

    The ratio is regressed onto the best one within bounds, 1 + high above the group's median and 1 - low below it:

        loss = token mean of |(rho - target) A|,  target = 1 - low + (low + high) sigmoid(z)
        A = (r - mean_g) / (std_g + epsilon),  z = (r - median_g) / (std_g + epsilon) / temperature

    ddof 1 as in the code (its YAML has low = high = 0.2, temperature 1). Of rewards right or wrong only the minority is
    pushed, unless a group is split evenly; the others, at the median, are pulled back to 1. A group of one has A = 0.
    Meant for several epochs per batch.
    """
    check_number("temperature", temperature, above=0)
    objective = policy_gradient(token_ratio(), toward_ratio("ratio_target"), token_mean())
    transform = chain(group_relative("std", ddof, epsilon), aim_at_bounds(low, high, temperature, ddof, epsilon))
    return Algorithm(transform, objective)


def r2vpo(
    variance_limit: float = 0.02,
    multiplier: float = 0.04,
    multiplier_rate: float = 0.1,
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Ratio-Variance Regularized Policy Optimization (R2VPO, arXiv 2601.03320, 2026).

    max E[rho A] subject to E[(rho - 1)^2] <= delta, by a Lagrange multiplier and without a clip; E is the token mean:

        loss = -E[rho A] + lambda (E[(rho - 1)^2] - delta),  lambda <- max(0, lambda + eta (E[(rho - 1)^2] - delta))

    delta = variance_limit, lambda starts at `multiplier` and is updated after each update with eta = multiplier_rate
    (0 keeps it). The dual update is the standard one for this constraint, and the values of delta and eta are ours: the
    paper's were not available. A is GRPO's, with ddof and epsilon. For replayed rollouts, log pi_behaviour is that
    of the policy that drew them.
    """
    check_number("variance_limit", variance_limit, least=0)
    check_number("multiplier", multiplier, least=0)

    def rise(value: jax.Array, feedback: dict[str, jax.Array]) -> jax.Array:
        return jnp.maximum(0.0, value + multiplier_rate * feedback["ratio/excess"])

    objective = policy_gradient(token_ratio(), unclipped(), token_mean())
    transform = chain(group_relative("std", ddof, epsilon), controller("variance_multiplier", multiplier, rise))
    return Algorithm(transform, objective + "variance_multiplier" * ratio_variance(variance_limit))


def mdpo_mirror_descent(
    step_size: float = 1.0, total_steps: float | None = None, estimator: str = "k3", epsilon: float = 1e-8
) -> Algorithm:
    """Mirror Descent Policy Optimization (MDPO, arXiv 2005.09814, 2020).

    Several gradient steps per batch on the policy gradient with an explicit KL to the policy of the batch, no clip:

        loss = token mean of -rho A + (1/t_k) KL(pi || pi_k),  t_k = step_size (1 - k / total_steps), k = 0, 1, ...

    KL from the samples of pi_k, differentiated through rho, by the estimator "k3", rho log rho - rho + 1, or "k1",
    rho log rho: the same in expectation, but k1's gradient at pi_k is that of log pi, noise 1/t_k times as large as
    that of an advantage of 1. total_steps: iterations of the run; where None t_k is step_size. A: rewards minus the
    group's mean, standardised over the batch with epsilon in the root, in place of the paper's critic. The code's
    own counter starts at 1 + 1/K; this one at 1.
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
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Reincarnating Mix-policy Proximal Policy Gradient (ReMix, arXiv 2507.06892, 2025).

    For rollouts of the last few policies mixed with fresh ones, c = pi_old / pi_behaviour centres the clip:

        loss = -token mean of min(rho A, clip(rho, c - clip_low, c + clip_high) A) - entropy_coefficient H
               + kl_coefficient [lambda k3(pi, reference) + (1 - lambda) k3(pi, old)]
        lambda(t) = max(1 - drop ceil(max(t - hold, 0) / every), least)  in iteration t = 1, 2, ...

    rho is against the policy that drew the token; c = 1 for fresh rollouts. A is GRPO's, with ddof and epsilon. Both
    coefficients, and the estimator, are ours: the source gives none. The paper's second anchor is the policy of one
    iteration before; ours, `old`, is that at the start of this one. Rollout: with probability 0.4 a trajectory is of
    one of the last two policies, two passes per batch; from iteration 50 or 100 on only fresh ones, and
    the reference is then to become the policy of that iteration, which is for the loop to do.
    """
    objective = policy_gradient(token_ratio(), centred_clip(clip_low, clip_high), token_mean(), needs={"old_logp"})
    objective -= entropy_coefficient * entropy()
    objective += kl_coefficient * mixed_anchor("k3")
    return Algorithm(chain(group_relative("std", ddof, epsilon), mix_anchors(hold, every, drop, least)), objective)


def capo_curvature(
    change_limit: float = 0.01,
    kl_limit: float = 1e-4,
    symmetric: bool = True,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    average: str = "sequence",
    scale: str = "none",
    learning_rate: float | None = None,
    max_length: float | None = None,
) -> Algorithm:
    """Curvature-Aware Policy Optimization (CAPO, arXiv 2510.00819, 2025).

    Tokens are dropped whose own gradient step would, in a second-order model of the last layer, change the objective by
    change_limit or more, |m_H| (symmetric) or m_H not in [0, change_limit), or the policy by kl_limit or more, m_F:

        m_H = lr <g, G> + lr^2/2 H,  m_F = lr^2/2 (v.u)^2;  see `objectives.curvature`

    A limit of 0 is off. The rest is GRPO with A = r - mean_g (scale "std" divides), clip_low, clip_high and no KL:
    average "sequence" takes the mean over sequences of the mean over the tokens kept; "constant" divides each
    sequence by max_length (4096 where None: ours), as Dr. GRPO does; with that the
    paper has kl_limit 1e-3 or 1e-2, change_limit 5e-4.
    G = g, a plain gradient step of learning_rate (the paper's 1.5e-5 where None): the closed form needs no
    distributions. The paper's model is of Adam's step.
    """
    require_choice("average", average, ("sequence", "constant"))
    rate, longest = 1.5e-5 if learning_rate is None else learning_rate, 4096 if max_length is None else max_length

    def kept_mean(values: jax.Array, batch: Trajectories) -> jax.Array:
        # Sequences of which nothing is kept still count.
        return jnp.sum(row_means(values, batch)) / totals_of(batch)["rows"]

    transform = chain(group_relative(scale), keep_small_steps(rate, change_limit, kl_limit, symmetric))
    mean = kept_mean if average == "sequence" else constant(longest)
    return Algorithm(transform, policy_gradient(token_ratio(), clip(clip_low, clip_high), mean))
