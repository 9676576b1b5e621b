"""Truncated Proximal Policy Optimization (T-PPO)."""

from __future__ import annotations

import math
from typing import Annotated

from jaxrl_llm.advantages.tokens.windows import windowed_advantages
from jaxrl_llm.algorithms.classic.ppo import clipped_policy
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.hyperparameters import OURS, RUN, Count, NonNegative
from jaxrl_llm.core.rules import Partial
from jaxrl_llm.objectives.values import value_loss


@method(paper="arXiv 2506.15050", year=2025, test="test_truncated.py::test_it_is_its_loop")
def t_ppo(
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    value_clip: Annotated[float | None, OURS] = None,
    value_coefficient: Annotated[NonNegative, OURS] = 1.0,
    gamma: Annotated[float, OURS] = 1.0,
    lam: Annotated[float, OURS] = 0.95,
    segments: Annotated[int, OURS] = 3,
    max_length: Annotated[Count | None, RUN] = None,
) -> Algorithm:
    """Truncated Proximal Policy Optimization (T-PPO).

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
    """
    check_number("segments", segments, least=1)
    window = 0 if max_length is None or segments == 1 else math.ceil(max_length / segments)
    objective = clipped_policy(clip_low, clip_high) + value_coefficient * value_loss(value_clip)
    strategy = Partial(segment_tokens=window, train_unfinished=True)
    return Algorithm(windowed_advantages(gamma, lam), objective, strategy=strategy)
