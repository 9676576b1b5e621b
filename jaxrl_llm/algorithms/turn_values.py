"""Methods of episodes with several turns that learn a critic."""

from __future__ import annotations

from typing import Literal

from jaxrl_llm.advantages.returns import generalised_advantages, whiten_advantages
from jaxrl_llm.advantages.turns.turn_rewards import (
    between_turns,
    needs_turns,
    shared_turn_rewards,
    turn_rewards_at_the_end,
)
from jaxrl_llm.algorithms.actor_critic import clipped_policy, ppo
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import entropy
from jaxrl_llm.objectives.values import huber, value_loss
from jaxrl_llm.utils.errors import require_choice

__all__ = ["multi_turn_recipe", "poad"]


def multi_turn_recipe(
    rewards: Literal["dense", "sparse"] = "dense",
    success: float = 0.0,
    most: int | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    value_clip: float | None = 0.2,
    value_coefficient: float = 1.0,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
    kl_coefficient: float = 0.01,
) -> Algorithm:
    """PPO on whole episodes (A Practitioner's Guide to Multi-turn Agentic RL, arXiv 2510.01132, 2025).

    An episode is one sequence of the policy's and the environment's tokens, and its rewards come at the ends of turns:

        dense:   r_k / n at the last token of turn k, beside the score at the last one
        sparse:  all of it at the last token of the episode

    n is the number of positive rewards of turns in an episode that is won, whose last turn has a reward, the score
    included, above `success`; otherwise `most`, the most that the task gives (None: the turns that the batch has room
    for). Generalised advantages (gamma, lam) skip the environment's tokens. All else is `ppo`: clip_low, clip_high,
    value_clip, value_coefficient, whiten, and kl_coefficient times k1 in the rewards of tokens. The paper compares it
    with `grpo` and `rloo`, which run on such episodes by their own names.

    Defaults. Code: gamma, kl_coefficient. Ours: rewards, success, most, clip_low, clip_high, value_clip,
    value_coefficient, lam, whiten.
    """
    require_choice("rewards", rewards, ("dense", "sparse"))
    base = ppo(
        clip_low, clip_high, None, value_clip, value_coefficient, gamma, lam, whiten, kl_coefficient=kl_coefficient
    )  # fmt: skip
    placed = shared_turn_rewards(success, most) if rewards == "dense" else turn_rewards_at_the_end()
    return Algorithm(chain(needs_turns(), placed, base.transform), base.objective)


def poad(
    gamma: float = 0.95,
    lam: float = 0.95,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    value_clip: float | None = 0.2,
    value_coefficient: float = 1.0,
    huber_width: float = 10.0,
    entropy_coefficient: float = 0.01,
    whiten: bool = True,
) -> Algorithm:
    """Policy Optimization with Action Decomposition (POAD, arXiv 2405.15821, 2024).

    PPO of tokens in which time passes between turns, not between the tokens of one: rewards come with the last token
    of a turn, and the discount is gamma from there to the next turn, and 1 within a turn.

        delta = V_{t+1} - V_t                    within a turn,    A_t = delta + lam A_{t+1}
        delta = r_k + gamma V_{t+1} - V_t        at its end,       A_t = delta + gamma lam A_{t+1}

    with V = 0 after the episode. The loss is PPO's clip (clip_low, clip_high) and value_coefficient times a clipped
    (value_clip) Huber loss of the critic, quadratic up to huber_width, less entropy_coefficient times the entropy, all
    averaged over tokens. whiten: advantages are standardised over the actions of the batch, the code over those that
    are not 0. With gamma 1 it is PPO of tokens. The code skips minibatches of a divergence above 0.02, which is not
    done here.

    Defaults. Code: gamma, lam, clip_low, clip_high, value_clip, huber_width, entropy_coefficient, whiten. Ours:
    value_coefficient.
    """
    credit = chain(needs_turns(), generalised_advantages(between_turns(gamma), lam))
    objective = clipped_policy(clip_low, clip_high)
    objective += value_coefficient * value_loss(value_clip, error=huber(huber_width))
    return Algorithm(
        chain(credit, whiten_advantages()) if whiten else credit, objective - entropy_coefficient * entropy()
    )
