"""Difficulty-targeted Online Data Selection and Rollout Replay (DOTS + RR)."""

from __future__ import annotations

import math
from typing import Annotated

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.hyperparameters import OURS, PAPER, Count, NonNegative, NonNegativeInt, Positive, ZeroOrOne
from jaxrl_llm.core.log_ratios import LARGEST
from jaxrl_llm.core.transform import chain
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.targets import near_predicted
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.off_policy import importance_correction
from jaxrl_llm.replay.base import times_as_many, whole_groups


@method(
    paper="arXiv 2506.05316",
    year=2025,
    test="test_replayed.py::test_dots_rr_is_the_loop",
    lacks={
        "predictor": (
            "a language model's embeddings and networks trained before the run; words are counted instead, and 7 "
            "numbers fitted",
            "a model of difficulties",
        )
    },
)
def dots_rr(
    target: Annotated[float, PAPER] = 0.5,
    temperature: Annotated[Positive, PAPER] = 1e-3,
    references: Annotated[int, PAPER] = 256,
    every: Annotated[Count, PAPER] = 2,
    width: Annotated[float, OURS] = 0.2,
    embedding: Annotated[str, OURS] = "",
    fresh_share: Annotated[float, PAPER] = 0.5,
    replay_groups: Annotated[NonNegativeInt, PAPER] = 512,
    clip_low: Annotated[NonNegative, PAPER] = 0.2,
    clip_high: Annotated[NonNegative, PAPER] = 0.2,
    ddof: Annotated[ZeroOrOne, OURS] = 1,
    epsilon: Annotated[NonNegative, OURS] = 1e-6,
) -> Algorithm:
    """Difficulty-targeted Online Data Selection and Rollout Replay (DOTS + RR).

    In every `every`-th step the groups of `references` more prompts, drawn uniformly, measure success rates d_k and are
    not trained on. Those of the others are predicted by attention to them, and prompts are drawn without replacement:

        p0 = sum_k softmax_k(e_q . e_k / width) d_k,    p = sigmoid(logit(p0) / s + b)
        P proportional to exp(-|p - target| / temperature)

    From the second step on, groups of the store join the fresh ones, (1 - fresh_share)/fresh_share of their number,
    drawn uniformly and whole; it has the newest replay_groups groups with different rewards. prompts_per_step is the
    number of fresh groups. With mu the policy that sampled the token, r = pi/mu, r0 = pi_old/mu (stop-gradient),

        loss = token mean of max(-A r, -A clip(r, r0 (1 - clip_low), r0 (1 + clip_high)))

    which is r0 times PPO's clipped loss in pi/pi_old. A = (reward - mean_g)/(std_g + epsilon) (ddof) is what it was
    when the group was fresh, and then r0 = 1.

    The paper embeds prompts with a language model, maps them by two networks, and computes s and b by a third from the
    mean and deviation of d, all trained before the run on measured rates. Here e are the normalised numbers in the
    column `embedding` of the data set, or, without one, counts of words and pairs of words; the width, s and b are 7
    numbers fitted during the run by the same cross-entropy (`curriculum.difficulty`). The paper measures the references
    before it draws the same step's prompts; here they are sampled beside these, and serve the draws after that step.
    """
    check_number("fresh_share", fresh_share, above=0, most=1)
    rule = near_predicted(target, temperature, references, every, width, embedding or None)
    weighted = importance_correction("token", "truncate", high=math.exp(LARGEST))  # never truncated
    objective = policy_gradient(token_ratio("old"), clip(clip_low, clip_high), token_mean())
    return Algorithm(
        chain(group_relative(ddof=ddof, epsilon=epsilon), weighted), objective, curriculum=choose_prompts(rule),
        replay=whole_groups(**times_as_many((1 - fresh_share) / fresh_share), groups=replay_groups),
    )  # fmt: skip
