"""RL with guided feedback (RLGF, Learning to Generate Better Than Your LLM)."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxrl_llm.advantages.guide_masks import split_at_switch
from jaxrl_llm.advantages.kl_rewards import kl_reward
from jaxrl_llm.advantages.returns import generalised_advantages, whiten_advantages
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import CODE, OURS, PAPER, NonNegative
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.values import value_loss
from jaxrl_llm.rollouts.guidance.two_policies import two_policies
from jaxrl_llm.utils.errors import is_off


@method(
    paper="arXiv 2306.11816",
    year=2023,
    test="test_guide_and_learner.py::test_rlgf_by_loop",
    beside={"lols": ("LOLS: a guide and a learner in turns, with two critics", "a second critic")},
)
def rlgf(
    begins: Annotated[Literal["guide", "learner", "learner_first"], CODE] = "guide",
    column: Annotated[str, OURS] = "guide",
    guide: Annotated[str | None, OURS] = None,
    share: Annotated[float, PAPER] = 0.8,
    learner_steps: Annotated[int, CODE] = 20,
    kl_coefficient: Annotated[NonNegative, OURS] = 0.05,
    gamma: Annotated[float, CODE] = 1.0,
    lam: Annotated[float, CODE] = 0.95,
    clip_low: Annotated[NonNegative, PAPER] = 0.2,
    clip_high: Annotated[NonNegative, PAPER] = 0.2,
    value_clip: Annotated[float | None, OURS] = 0.2,
    value_coefficient: Annotated[NonNegative, OURS] = 1.0,
) -> Algorithm:
    """RL with guided feedback (RLGF, Learning to Generate Better Than Your LLM).

    A response of n tokens is drawn from one policy; with probability `share` its first h tokens are kept, h uniform
    from 1 to n - 1, else h = 0; and the other policy writes the rest. One of the two is a guide, of which only samples
    are needed. begins says who writes the first h tokens:

        guide            PPO++: the guide brings the learner to good states. Losses of policy and critic on the
                         learner's tokens t >= h
        learner          AggreVaTeD: the policy loss is on the learner's tokens t < h, the value loss on the guide's,
                         t >= h, so that the critic estimates the guide's value, which the learner improves on
        learner_first    D2LOLS: AggreVaTeD for learner_steps iterations, then PPO++

    The score of the whole response is the reward of the last token, and each action's reward gets
    -kl_coefficient (logp_old - logp_ref); A is from GAE (gamma, lam) over the row's actions, R = A + V, and A then
    whitened. With means over the tokens that a loss sees,

        loss = -mean min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
               + value_coefficient/2 mean max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2)

    Where the guide begins, its samples come from the row's `column`, a text or a list of texts: a guide does not learn,
    so it may answer before the run. Where it completes, `guide` is FILE.py:FUNCTION of the problem and the response so
    far, which returns the rest. LOLS, which alternates at random between both with a critic for each, is not included.
    The guide's sampling (the paper: top-p 0.92, top-k 50) is its own.
    """
    transform = chain(
        *([] if is_off(kl_coefficient) else [kl_reward(kl_coefficient, of="old")]),
        generalised_advantages(gamma, lam),
        whiten_advantages(),
        split_at_switch(),
    )
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean())
    objective += value_coefficient * value_loss(value_clip)
    return Algorithm(transform, objective, rollout=two_policies(begins, column, guide, share, learner_steps))
