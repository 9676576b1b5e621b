"""PPO for long chains of thought: separate or length-adaptive lambdas, and training on windows of completions."""

from __future__ import annotations

import math

from jaxrl_llm.advantages.returns import (
    generalised_advantages,
    length_adaptive,
    whiten_advantages,
)
from jaxrl_llm.advantages.tokens.windows import windowed_advantages
from jaxrl_llm.algorithms.actor_critic import chain_present, clipped_policy
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.rules import Partial
from jaxrl_llm.objectives.averaging.subset import count_tokens, mean_by
from jaxrl_llm.objectives.penalties import imitation, right_answers
from jaxrl_llm.objectives.values import value_loss

__all__ = ["t_ppo", "vapo", "vc_ppo"]


def vc_ppo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    value_clip: float | None = 0.2,
    value_coefficient: float = 1.0,
    gamma: float = 1.0,
    lam: float = 0.95,
    lam_critic: float = 1.0,
    whiten: bool = True,
) -> Algorithm:
    """Value-Calibrated PPO (VC-PPO, What's Behind PPO's Collapse in Long-CoT?, arXiv 2503.01491, 2025).

    Decoupled GAE: advantages as in `ppo` with lam < 1, but the critic's targets are R_t = A_t(lam_critic) + V_t. With
    lam_critic 1 these are Monte Carlo returns, in which the reward does not decay towards the first tokens. clip_low,
    clip_high, value_clip, value_coefficient, gamma and whiten as in `ppo`; no reference policy.

    The paper first trains the critic alone, on the Monte Carlo returns of the frozen policy, for 100 steps: set the
    run's `critic_steps`.

    Defaults. Paper: clip_low, clip_high, gamma, lam, lam_critic. Ours: value_clip, value_coefficient, whiten.
    """
    advantages = generalised_advantages(gamma, lam, lam_critic)
    transform = chain_present(advantages, whiten_advantages() if whiten else None)
    return Algorithm(transform, clipped_policy(clip_low, clip_high) + value_coefficient * value_loss(value_clip))


def vapo(
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    alpha: float = 0.05,
    value_clip: float | None = 0.2,
    value_coefficient: float = 1.0,
    gamma: float = 1.0,
    lam_critic: float = 1.0,
    whiten: bool = True,
    imitation_coefficient: float = 0.1,
    success: float = 0.5,
) -> Algorithm:
    """Value-based Augmented PPO (VAPO, arXiv 2504.05118, 2025).

    `vc_ppo` with lam = 1 - 1 / (alpha l) for an answer of l tokens, clipped to [0, 1], so that the sum of the GAE
    coefficients, alpha l, grows with l; a higher clip_high; and, for the answers with a score above success,

        loss += imitation_coefficient * -(sum over their tokens of logp) / (number of their tokens)

    With alpha 0.05 answers of up to 20 tokens have lam 0. clip_low, value_clip (None: off), value_coefficient, gamma,
    lam_critic and whiten as in `vc_ppo`. The paper samples 16 answers for each of 512 prompts rather than fewer for
    more prompts, and trains the critic alone for 50 steps first (the run's `critic_steps`).

    Defaults. Paper: clip_low, clip_high, alpha, gamma, lam_critic, imitation_coefficient. Ours: value_clip,
    value_coefficient, whiten, success.
    """
    advantages = generalised_advantages(gamma, length_adaptive(alpha), lam_critic)
    right = right_answers(success)
    transform = chain_present(
        advantages,
        whiten_advantages() if whiten else None,
        count_tokens(right, "right_tokens"),
    )
    policy = clipped_policy(clip_low, clip_high) + imitation_coefficient * imitation(right, mean_by("right_tokens"))
    return Algorithm(transform, policy + value_coefficient * value_loss(value_clip))


def t_ppo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    value_clip: float | None = None,
    value_coefficient: float = 1.0,
    gamma: float = 1.0,
    lam: float = 0.95,
    segments: int = 3,
    max_length: int | None = None,
) -> Algorithm:
    """Truncated Proximal Policy Optimization (T-PPO, arXiv 2506.15050, 2025).

    A step ends when each completion has a window of l new tokens or is finished, and trains on all completions. The
    policy is trained on the windows only, with the extended GAE over their tokens t up to the last one, n,

        delta_t = r_t + gamma V_{t+1} - V_t,  V_{n+1} = V_n where the completion continues, 0 where it is finished
        A_t = sum over j >= t of (gamma lam)^(j-t) delta_j
        loss = -mean over the windows' tokens of min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    and the critic on all tokens of the completions that were finished in this step: value_coefficient/2 times the mean
    of (V - R)^2 with R their final reward (lambda 1, gamma 1). Without a finished completion there is no value loss.
    value_clip as in `ppo` (the paper has none). A completion that waits for the rest of its group is in the batch with
    zero weight.

    l is the run's `segment_tokens`, or the longest completion, max_length, divided by `segments`: 8k of 24k in the
    paper. With segments 1 every completion is finished in its step, as in a rollout without windows. While the critic
    is untrained, windows before the last have no learning signal: train it first (the run's `critic_steps`).

    Defaults. Ours: value_clip, gamma, segments, clip_low, clip_high, value_coefficient, lam. Run: max_length.
    """
    check_number("segments", segments, least=1)
    window = 0 if max_length is None or segments == 1 else math.ceil(max_length / segments)
    objective = clipped_policy(clip_low, clip_high) + value_coefficient * value_loss(value_clip)
    strategy = Partial(segment_tokens=window, train_unfinished=True)
    return Algorithm(windowed_advantages(gamma, lam), objective, strategy=strategy)
