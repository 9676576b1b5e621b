import jax.numpy as jnp

from jaxrl_llm.advantages import compared, drop_rows, of_episode, turn_advantages
from jaxrl_llm.advantages.episodes import EPISODES, turns_before
from jaxrl_llm.advantages.turns import OfTurns, episode_backwards, rewards_of_turns, turn_mask
from jaxrl_llm.algorithms.method import Algorithm, method, one_reward_of, run_settings
from jaxrl_llm.core.annotations import Code, Fraction, MomentsOver, NonNegative, Ours
from jaxrl_llm.core.buckets import bucket_moments, joint_key
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.rollouts.agents.program import semi_online


@method(paper="arXiv 2509.11543", test="test_turn_rows.py::test_ui_s1_worked_example_and_loop")
@run_settings(one_reward_of("environment", why="the reward of its recorded environment"))
def ui_s1(
    gamma: Code[float] = 0.5,
    patches: Code[int] = 2,
    step_weight: Code[float] = 1.0,
    episode_weight: Code[float] = 1.0,
    over: Code[MomentsOver] = "turns",
    least_deviation: Code[float] = 0.3,
    matched: Ours[float] = 0.8,
    column: Ours[str] = "steps",
    turns: Ours[int] = 16,
    epsilon: Code[NonNegative] = 1e-6,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Code[NonNegative] = 1e-4,
) -> Algorithm:
    """Semi-online reinforcement learning (UI-S1).

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
    """
    returns = broken_returns(gamma, matched)
    step = compared(returns, same_turn_of_episode(), "std", epsilon=epsilon)
    episode = of_episode("std", over, epsilon, "score")
    credit = turn_advantages(episode, step, weights=(episode_weight, step_weight), needs={"turn_rewards", *EPISODES})
    return Algorithm(
        chain(drop_rows(varies_little(returns, least_deviation)), credit),
        clipped_policy(clip_low, clip_high, kl_coefficient=kl_coefficient),
        rollout=semi_online(column, patches, turns),
    )


@batch_part
def same_turn_of_episode(batch: Trajectories) -> Array:
    """Keys: turns of a group with the same number in their episodes, also where these are several rows."""
    number = turns_before(batch)[:, None] + jnp.arange(turn_mask(batch).shape[1])
    return joint_key(jnp.broadcast_to(batch.group[:, None], number.shape), number)


@batch_part
def broken_returns(batch: Trajectories, gamma: Fraction = 0.5, matched: float = 0.8) -> Array:
    """Values: returns of turns that end where a turn does not match (UI-S1, 2509.11543). Backwards over an episode,

        R <- r_t + gamma R,    G_t = R    if the turn matches, r_t > matched
        G_t = r_t,             R <- 0     if not

    with r the environment's rewards of turns, also over the rows of an episode; without these the score is that of its
    last turn.
    """
    r = rewards_of_turns(batch) if batch.turn_rewards is None else jnp.nan_to_num(batch.turn_rewards)
    return episode_backwards(batch, r, gamma, r > matched)


@batch_part
def varies_little(batch: Trajectories, values: OfTurns, least: NonNegative) -> Array:
    """A function `batch -> bool[N]`: rows of groups whose turns' values have a deviation (n - 1) of at most `least`."""
    mask = turn_mask(batch)
    key = jnp.broadcast_to(batch.group[:, None], mask.shape).reshape(-1)
    deviation = bucket_moments(key, jnp.where(mask, values(batch), jnp.nan).reshape(-1))[2]
    return jnp.max(deviation.reshape(mask.shape), axis=1) <= least
