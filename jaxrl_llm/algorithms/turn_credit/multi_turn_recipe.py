from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages.turns import needs_turns, rewards_of_turns, turn_mask
from jaxrl_llm.algorithms.classic.ppo import ppo
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import Code, Count, NonNegative, Ours, Positive
from jaxrl_llm.core.parts import Trajectories, chain, stateless_part


@method(paper="arXiv 2510.01132", test="test_turn_values.py::test_multi_turn_recipe_worked_example")
@run_needs(turn_rewards="rewards at the ends of turns", turns="episodes of several turns")
def multi_turn_recipe(
    rewards: Ours[Literal["dense", "sparse"]] = "dense",
    success: Ours[float] = 0.0,
    most: Ours[int | None] = None,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    value_clip: Ours[Positive | None] = 0.2,
    value_coefficient: Ours[NonNegative] = 1.0,
    gamma: Code[float] = 1.0,
    lam: Ours[float] = 1.0,
    whiten: Ours[bool] = True,
    kl_coefficient: Code[NonNegative] = 0.01,
) -> Algorithm:
    """PPO on whole episodes (A Practitioner's Guide to Multi-turn Agentic RL).

    An episode is one sequence of the policy's and the environment's tokens, and its rewards come at the ends of turns:

        dense:   r_k / n at the last token of turn k, beside the score at the last one
        sparse:  all of it at the last token of the episode

    n is the number of positive rewards of turns in an episode that is won, whose last turn has a reward, the score
    included, above `success`; otherwise `most`, the most that the task gives (None: the turns that the batch has room
    for). Generalised advantages (gamma, lam) skip the environment's tokens. All else is `ppo`: clip_low, clip_high,
    value_clip, value_coefficient, whiten, and kl_coefficient times k1 in the rewards of tokens. The paper compares it
    with `grpo` and `rloo`, which run on such episodes by their own names.
    """
    base = ppo(
        clip_low, clip_high, None, value_clip, value_coefficient, gamma, lam, whiten, kl_coefficient=kl_coefficient
    )  # fmt: skip
    placed = shared_turn_rewards(success, most) if rewards == "dense" else turn_rewards_at_the_end()
    return Algorithm(chain(needs_turns(), placed, base.transform), base.objective)


@stateless_part({"turn_rewards"})
def shared_turn_rewards(batch: Trajectories, success: float = 0.0, most: Count | None = None) -> Trajectories:
    """Divide the rewards of an episode's turns by their number: n of them that are positive if the episode is won, else
    `most`, the most that its task can give.

    An episode is won if the reward of its last turn, the score included, is above `success`. most None: the turns that
    the batch has room for. A batch without rewards of turns stays as it is.
    """
    if batch.turn_rewards is None:
        return batch
    mask, rewards = turn_mask(batch), rewards_of_turns(batch)
    number = jnp.where(mask, jnp.arange(mask.shape[1]), -1)
    last = mask & (number == number.max(axis=1, keepdims=True))
    won = jnp.sum(jnp.where(last, rewards, 0.0), axis=1) > success
    own = jnp.where(mask, jnp.nan_to_num(batch.turn_rewards), 0.0)
    count = jnp.where(won, jnp.sum(own > 0, axis=1), mask.shape[1] if most is None else most)
    return batch.replace(turn_rewards=own / jnp.maximum(count, 1)[:, None])


@stateless_part()
def turn_rewards_at_the_end(batch: Trajectories) -> Trajectories:
    """Add the rewards of an episode's turns to its score, which comes with its last turn."""
    if batch.turn_rewards is None:
        return batch
    own = jnp.sum(jnp.where(turn_mask(batch), jnp.nan_to_num(batch.turn_rewards), 0.0), axis=1)
    return batch.replace(reward=batch.scores + own, turn_rewards=jnp.zeros_like(batch.turn_rewards))
