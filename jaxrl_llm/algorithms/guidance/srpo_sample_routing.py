"""Sample-Routed Policy Optimization (SRPO)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import CODE, OURS, PAPER, NonNegative
from jaxrl_llm.core.reference import exponential_average
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.distillation import route_failures, self_distillation, unless_distilled
from jaxrl_llm.rollouts.guidance.repair import succeeds
from jaxrl_llm.rollouts.guidance.teachers import with_right_siblings


@method(paper="arXiv 2604.02288", year=2026, test="test_self_distilled.py::test_srpo_is_its_loop")
def srpo_sample_routing(
    strength: Annotated[NonNegative, PAPER] = 1.0,
    success: Annotated[float, PAPER] = 0.5,
    decay: Annotated[NonNegative, CODE] = 0.95,
    share: Annotated[float, CODE] = 0.5,
    top: Annotated[int, CODE] = 100,
    cap: Annotated[float, CODE] = 2.0,
    column: Annotated[str | None, OURS] = None,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.28,
) -> Algorithm:
    """Sample-Routed Policy Optimization (SRPO).

    Samples of a group that failed (reward <= success) and have a teacher are distilled, the others are as in GRPO. The
    teacher q is a moving average of the policy's weights, decay theta_q + (1 - decay) theta after each update, which
    reads the same tokens after a longer prompt: with a sample of the group that succeeded, or, where none did, with the
    text of a column of the data set (None: there is no such text). With z_i = 1 for the rows that are distilled, and m
    over the actions of all rows,

        loss = [sum_m (1 - z_i) l + sum_m z_i w min(sg rho, cap) D(p, q)] / sum_m 1
        l = -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A),  A_i = r_i - mean of all G rewards
        D = (1 - a) KL(p || m) + a KL(q || m),  m = (1 - a) p + a q,  a = share (0: KL(q || p), 1: KL(p || q))
        w = exp(-strength H(q)) / its mean over all distilled tokens

    D is over the `top` most probable tokens of the policy before the update, and all others as one; in the code they
    are those of the current policy, which differ after the first gradient step. H is of the whole distribution. Groups
    in which all fail, without a column, have no signal. The memory is that of a reference policy and of 3 `top` numbers
    a token; the teacher's pass is of whole rows, not of shared prompts.
    """
    objective = policy_gradient(token_ratio(), unless_distilled(clip(clip_low, clip_high)), token_mean())
    return Algorithm(
        chain(group_relative("none"), route_failures(success, strength)),
        objective + self_distillation(top, share, cap),
        rollout=with_right_siblings(succeeds(success), column),
        reference=exponential_average(decay),
    )
