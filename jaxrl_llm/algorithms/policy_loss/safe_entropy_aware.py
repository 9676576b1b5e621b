"""Stable Alignment Finetuning with Entropy-aware predictive control (SAFE)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.advantages.returns import sequence_values, whiten_advantages
from jaxrl_llm.algorithms.classic.ppo import clipped_policy
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import CODE, OURS, NonNegative, Positive
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import entropy
from jaxrl_llm.objectives.thresholds import kl_threshold, threshold_penalty
from jaxrl_llm.objectives.values import huber, last_action_mean, soft_minimum, value_loss


@method(paper="arXiv 2602.04651", year=2026, test="test_actor_critic.py::test_safe_is_its_loop")
def safe_entropy_aware(
    clip_low: Annotated[NonNegative, CODE] = 0.2,
    clip_high: Annotated[NonNegative, CODE] = 0.2,
    value_clip: Annotated[float | None, CODE] = 0.2,
    value_coefficient: Annotated[NonNegative, CODE] = 0.5,
    huber_width: Annotated[float, CODE] = 0.5,
    temperature: Annotated[Positive, CODE] = 0.3,
    entropy_coefficient: Annotated[NonNegative, CODE] = 0.01,
    threshold: Annotated[float, CODE] = 0.3,
    proportional: Annotated[float, CODE] = 0.3,
    integral: Annotated[float, CODE] = 0.01,
    derivative: Annotated[float, CODE] = 0.05,
    penalty_scale: Annotated[NonNegative, CODE] = 0.1,
    entropy_floor: Annotated[NonNegative, CODE] = 2.0,
    window: Annotated[int, CODE] = 50,
    penalty_gradient: Annotated[bool, OURS] = True,
) -> Algorithm:
    """Stable Alignment Finetuning with Entropy-aware predictive control (SAFE).

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
