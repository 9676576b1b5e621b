"""Methods whose turns may be rows of their own, with prompts of their own."""

from __future__ import annotations

from typing import Literal

from jaxrl_llm.advantages.group import drop_rows, group_relative
from jaxrl_llm.advantages.turns.rounds import (
    EPISODES,
    broken_returns,
    episode_shares,
    same_turn_of_episode,
    varies_little,
)
from jaxrl_llm.advantages.turns.turn_rewards import needs_turns
from jaxrl_llm.advantages.turns.turns import compared, of_episode, turn_advantages
from jaxrl_llm.algorithms.presets import presets
from jaxrl_llm.algorithms.run_settings import one_reward_of, run_settings
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.averaging.episode_averages import episode_mean
from jaxrl_llm.objectives.policy_gradient import regularised
from jaxrl_llm.rollouts.agents.semi_online import semi_online
from jaxrl_llm.utils.errors import require_choice

__all__ = ["flow_grpo", "ui_s1"]


@presets(
    paper={"over": "episodes", "average": "episode"},
    code={"over": "turns", "average": "token"},
)
def flow_grpo(
    over: Literal["episodes", "turns"] = "episodes",
    average: Literal["episode", "token"] = "episode",
    epsilon: float = 1e-6,
    clip_low: float = 0.2,
    clip_high: float = 0.3,
    kl_coefficient: float = 0.001,
) -> Algorithm:
    """Flow-based group refined policy optimization (Flow-GRPO of AgentFlow, arXiv 2510.05592, 2025).

    The planner of a system of several modules is trained in its own flow: each of its turns is a short sequence with a
    prompt of its own, of the question, the memory so far and the tools, and has the outcome R of its episode:

        A_i = (R_i - mean_g R) / (std_g R + epsilon) on all T_i turns of episode i
        J = 1/G sum_i 1/T_i sum_t 1/|a_i^t| sum_j min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) - beta k3

    beta = kl_coefficient. over: whether an episode counts once in mean and deviation (n - 1), or once a turn. average:
    "episode" as above, or "token" over the tokens of the batch. preset "code" has the turns, so that long episodes
    weigh more, and the tokens.

    Rows of turns come from `rollouts.agents.agent(ENVIRONMENT, fresh=True)`, whose environment is the rest of
    the system and writes each prompt. Episodes whose turns are in one row, as those of --environment, are credited the
    same way, with the conversation so far in place of the memory. The code leaves out over-long prompts after the
    moments are taken; here an episode ends that does not fit.

    Defaults. Paper: over, average. Code: epsilon, clip_low, clip_high, kl_coefficient.
    """
    require_choice("over", over, ("episodes", "turns"))
    require_choice("average", average, ("episode", "token"))
    credit = group_relative(epsilon=epsilon, needs=EPISODES)
    if over == "turns":
        credit = turn_advantages(of_episode("std", "turns", epsilon, "score"), needs=EPISODES)
    mean = episode_mean() if average == "episode" else token_mean()
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), mean)
    steps = (needs_turns(fresh=True), credit, *((episode_shares(),) if average == "episode" else ()))
    return Algorithm(chain(*steps), regularised(objective, mean, kl_coefficient=kl_coefficient))


@run_settings(one_reward_of("environment", why="the reward of its recorded environment"))
def ui_s1(
    gamma: float = 0.5,
    patches: int = 2,
    step_weight: float = 1.0,
    episode_weight: float = 1.0,
    over: Literal["rows", "turns"] = "turns",
    least_deviation: float = 0.3,
    matched: float = 0.8,
    column: str = "steps",
    turns: int = 16,
    epsilon: float = 1e-6,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 1e-4,
) -> Algorithm:
    """Semi-online reinforcement learning (UI-S1, arXiv 2509.11543, 2025).

    Episodes are simulated on recorded trajectories of an expert (`environments.recorded`, the data set's `column`): the
    policy's own replies stay in the dialogue while they match; one that deviates is replaced by the expert's, at most
    `patches` times an episode (-1: always), so that the recorded next screen is right, and else ends it. Replies are
    trained on, the expert's are context. With r_t the reward of step t and E the score of the episode

        G_t = r_t + gamma G_{t+1} where the reply matches (r_t > matched), r_t where it does not, which G before t lack
        A_t = episode_weight (E - mean_g E) / (std_g E + epsilon) + step_weight (G_t - mean_t G) / (std_t G + epsilon)

    mean_t: over the rollouts of the group that reach step t, which all see the same screen; a lone one gets 0. over:
    whether moments of E count each step or each row once. Groups whose G have a deviation of at most least_deviation
    teach nothing and are dropped. PPO's clip (clip_low, clip_high) and kl_coefficient k3, averaged over tokens. turns:
    most steps of an episode.

    Defaults. Code: gamma, patches, step_weight, episode_weight, over, least_deviation, epsilon, kl_coefficient. Ours:
    matched, column, turns, clip_low, clip_high.
    """
    returns = broken_returns(gamma, matched)
    step = compared(returns, same_turn_of_episode(), "std", epsilon=epsilon)
    episode = of_episode("std", over, epsilon, "score")
    credit = turn_advantages(episode, step, weights=(episode_weight, step_weight), needs={"turn_rewards", *EPISODES})
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean())
    return Algorithm(
        chain(drop_rows(varies_little(returns, least_deviation)), credit),
        regularised(objective, token_mean(), kl_coefficient=kl_coefficient),
        rollout=semi_online(column, patches, turns),
    )
