"""GRPO with the Unlikeliness Reward (Rewarding the Unlikely)."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxrl_llm.advantages.group import drop_uniform_groups, group_relative
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.algorithms.reward_rules import less_for_likely
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.hyperparameters import CODE, PAPER, NonNegative
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import clip, kl, policy_gradient, token_mean, token_ratio
from jaxrl_llm.rewards import transforms as rewards
from jaxrl_llm.utils.errors import require_choice


@method(paper="arXiv 2506.02355", year=2025, test="test_shaped_reward.py::test_unlikeliness_against_a_loop")
def unlikeliness_reward(
    coefficient: Annotated[NonNegative, PAPER] = 0.25,
    ranks: Annotated[Literal["paper", "code"], PAPER] = "paper",
    clip_low: Annotated[NonNegative, CODE] = 0.2,
    clip_high: Annotated[NonNegative, CODE] = 0.2,
    kl_coefficient: Annotated[NonNegative, CODE] = 0.1,
    epsilon: Annotated[NonNegative, CODE] = 1e-6,
) -> Algorithm:
    """GRPO with the Unlikeliness Reward (Rewarding the Unlikely).

    Reduces the reward of a correct sample the more likely it is within its group of G, so that rare solutions survive:

        r_i = R_i (1 - coefficient (G - rank_i) / G), rank 0 for the highest mean log-probability of its tokens

    ranks "code" has G - 1 - rank_i in place of G - rank_i, as in the released code. The paper ranks by the sample's
    probability; here, as in the code, by the mean log-probability of its tokens under the behaviour policy. Ranks
    include wrong samples; equal samples share a rank. Groups of equal rewards are dropped first. The rest is GRPO
    (epsilon) with a token mean of PPO's clip (clip_low, clip_high) and kl_coefficient times k3. Two epochs per batch
    strengthen the effect.
    """
    check_number("coefficient", coefficient, least=0, most=1)
    require_choice("ranks", ranks, ("paper", "code"))
    offset = 1.0 if ranks == "code" else 0.0

    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean())
    objective += kl_coefficient * kl(to="reference", estimator="k3")
    return Algorithm(
        chain(
            drop_uniform_groups(),
            rewards.rescore(less_for_likely(coefficient, offset)),
            group_relative(epsilon=epsilon),
        ),
        objective,
    )
