"""Hierarchical plan-execute RL (HiPER)."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxrl_llm.advantages.turns.plans import HEADS, hierarchical_advantages, plan_penalties
from jaxrl_llm.algorithms.classic.ppo import clipped_policy
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import CODE, OURS, NonNegative
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import token_mean
from jaxrl_llm.objectives.policy_gradient import regularised
from jaxrl_llm.objectives.value_heads import head_value_loss


@method(
    paper="arXiv 2602.16165",
    year=2026,
    test="test_turn_planned.py::test_hiper_worked_example_and_loop",
    needs={
        "plan": "subgoals of the policy's own, between tags",
        "turn_rewards": "rewards of turns",
        "turns": "episodes of several turns",
    },
)
def hiper(
    gamma: Annotated[float, CODE] = 1.0,
    lam_turn: Annotated[float, CODE] = 1.0,
    lam_segment: Annotated[float, CODE] = 0.95,
    whiten: Annotated[bool, CODE] = True,
    bootstrap_truncated: Annotated[bool, CODE] = True,
    keep_penalty: Annotated[float, CODE] = -0.3,
    keep_penalties: Annotated[Literal["fixed", "shared"], CODE] = "fixed",
    inconsistency_penalty: Annotated[float, CODE] = -0.3,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    value_clip: Annotated[float | None, OURS] = 0.2,
    value_coefficient: Annotated[NonNegative, OURS] = 1.0,
    kl_coefficient: Annotated[NonNegative, CODE] = 0.01,
) -> Algorithm:
    """Hierarchical plan-execute RL (HiPER).

    Each reply decides whether to KEEP the subgoal or SWITCH to another, says the subgoal, and an action, each between
    tags (`rollouts.agents.plans.planned`). The turns of one subgoal are a segment. Generalised advantages of turns
    within segments credit the tokens of actions, those of segments the tokens of subgoals that begin one, and the
    return of the segment the tokens of decisions, each against a head of the critic
    (`advantages.turns.plans.plan_credit`; gamma, lam_turn, lam_segment). Other tokens get 0. whiten: each kind is
    standardised over turns. bootstrap_truncated: an episode that was cut off ends with the value of its last turn.

    A turn that keeps the subgoal gets keep_penalty (keep_penalties "shared", as for WebShop with -3.5: together its
    product with their share of the turns), and inconsistency_penalty if it says another one all the same. Penalties
    for invalid actions are the environment's. The loss is PPO's clip (clip_low, clip_high) and kl_coefficient k3,
    averaged over tokens, and value_coefficient times the clipped (value_clip) squares of the heads, each averaged over
    the turns that train it.

    Where the heads are read is not in what we read of the code: at the first token of their parts. A row is an episode.
    Without plans (--algorithm.without plan) every turn is in one segment and all its tokens are its action.
    """
    objective = regularised(clipped_policy(clip_low, clip_high), token_mean(), kl_coefficient=kl_coefficient)
    return Algorithm(
        chain(
            plan_penalties(keep_penalty, inconsistency_penalty, keep_penalties),
            hierarchical_advantages(gamma, lam_turn, lam_segment, whiten, bootstrap_truncated),
        ),
        objective + value_coefficient * head_value_loss(HEADS, value_clip),
    )
