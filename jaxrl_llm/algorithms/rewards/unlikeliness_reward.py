from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import drop_uniform_groups, group_relative
from jaxrl_llm.advantages.multipliers import row_mean
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, Fraction, NonNegative, Number, Paper
from jaxrl_llm.core.buckets import bucket_sums
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain
from jaxrl_llm.objectives import clipped_policy, kl
from jaxrl_llm.rewards import transforms as rewards


@method(paper="arXiv 2506.02355", test="test_shaped_reward.py::test_unlikeliness_against_a_loop")
def unlikeliness_reward(
    coefficient: Paper[Fraction] = 0.25,
    ranks: Paper[Literal["paper", "code"]] = "paper",
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    kl_coefficient: Code[NonNegative] = 0.1,
    epsilon: Code[NonNegative] = 1e-6,
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
    less = rewards.rescore(less_for_likely(coefficient, offset=1.0 if ranks == "code" else 0.0))
    objective = clipped_policy(clip_low, clip_high) + kl_coefficient * kl(to="reference", estimator="k3")
    return Algorithm(chain(drop_uniform_groups(), less, group_relative(epsilon=epsilon)), objective)


@batch_part
def less_for_likely(b: Trajectories, coefficient: float, offset: float) -> Array:
    """A function `batch -> f32[N]`: the rewards of `unlikeliness_reward`."""
    return rank_penalty(b.scores, row_mean(b.behaviour_logp, b.action_mask), b.group, coefficient, offset)


def likelihood_rank(likelihood: Array, group: Array) -> tuple[Array, Array]:
    """Rank of each sample in its group, 0 for the most likely, and the size of the group, f32[N] each.

    likelihood: f32[N], NaN to exclude a sample. Equal samples share the mean of their ranks.
    """
    known = ~jnp.isnan(likelihood)
    mates = (group[:, None] == group) & known[:, None] & known
    above = jnp.sum(mates & (likelihood > likelihood[:, None]), axis=1)
    same = jnp.sum(mates & (likelihood == likelihood[:, None]), axis=1)
    (size,) = bucket_sums(group, known.astype(jnp.float32))
    return above + 0.5 * jnp.maximum(same - 1.0, 0.0), size


def rank_penalty(
    reward: Array, likelihood: Array, group: Array, coefficient: Number = 0.25, offset: Number = 0.0
) -> Array:
    """r_i (1 - coefficient (G - offset - rank_i)/G), f32[N]: lower for more likely samples (2506.02355).

    rank and G: see `likelihood_rank`. offset 0 also penalises the least likely sample, offset 1 does not.
    """
    rank, size = likelihood_rank(jnp.where(jnp.isnan(reward), jnp.nan, likelihood), group)
    return reward * (1 - coefficient * (size - offset - rank) / jnp.maximum(size, 1))
