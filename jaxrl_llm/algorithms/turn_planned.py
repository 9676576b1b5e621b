"""Methods of episodes whose turns say plans, with credit for each level of the plan."""

from __future__ import annotations

from typing import Literal

from jaxrl_llm.advantages.turns.plans import HEADS, hierarchical_advantages, plan_penalties
from jaxrl_llm.algorithms.actor_critic import clipped_policy
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import token_mean
from jaxrl_llm.objectives.policy_gradient import regularised
from jaxrl_llm.objectives.value_heads import head_value_loss

__all__ = ["hiper"]


def hiper(
    gamma: float = 1.0,
    lam_turn: float = 1.0,
    lam_segment: float = 0.95,
    whiten: bool = True,
    bootstrap_truncated: bool = True,
    keep_penalty: float = -0.3,
    keep_penalties: Literal["fixed", "shared"] = "fixed",
    inconsistency_penalty: float = -0.3,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    value_clip: float | None = 0.2,
    value_coefficient: float = 1.0,
    kl_coefficient: float = 0.01,
) -> Algorithm:
    """Hierarchical plan-execute RL (HiPER, arXiv 2602.16165, 2026).

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

    Defaults. Code: gamma, lam_turn, lam_segment, whiten, bootstrap_truncated, keep_penalty, keep_penalties,
    inconsistency_penalty, kl_coefficient. Ours: clip_low, clip_high, value_clip, value_coefficient.
    """
    objective = regularised(clipped_policy(clip_low, clip_high), token_mean(), kl_coefficient=kl_coefficient)
    return Algorithm(
        chain(
            plan_penalties(keep_penalty, inconsistency_penalty, keep_penalties),
            hierarchical_advantages(gamma, lam_turn, lam_segment, whiten, bootstrap_truncated),
        ),
        objective + value_coefficient * head_value_loss(HEADS, value_clip),
    )
