from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative, needs_turns, revised
from jaxrl_llm.advantages.multipliers import token_moments
from jaxrl_llm.advantages.returns import scored_actions
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import Code, NonNegative, Ours
from jaxrl_llm.core.buckets import joint_key
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain
from jaxrl_llm.objectives import clipped_policy, sequence_mean
from jaxrl_llm.rewards.transforms import paid_for_calls, rescore
from jaxrl_llm.rollouts.agents.fork import by_chance, forking_agents


@batch_part
def mean_over_paths(batch: Trajectories) -> Array:
    """A function `batch -> f32[N, L]`: of each token, the mean of the advantages of the rows that have its node."""
    node = jnp.nan_to_num(batch.need("node"), nan=-1.0).astype(jnp.int32)
    keys = joint_key(jnp.broadcast_to(batch.group[:, None], node.shape), node)
    return token_moments(batch.need("advantages"), scored_actions(batch), keys)[1]


@method(paper="arXiv 2507.19849", test="test_arpo_agentic.py::test_arpo_worked_example")
@run_needs(
    calls="calls of tools, for their bonus",
    failed_calls="calls that gave an error",
    turns="episodes of several turns, which fork after observations",
)
def arpo_agentic(
    initial: Code[int] = 8,
    branches: Code[int] = 2,
    probability: Code[float] = 0.5,
    entropy_weight: Code[NonNegative] = 0.2,
    first_tokens: Code[int] = 20,
    credit: Code[Literal["soft", "hard"]] = "soft",
    tool_bonus: Code[float] = 0.1,
    bonus_calls: Ours[int] = 2,
    success: Ours[float] = 0.0,
    epsilon: Ours[NonNegative] = 1e-6,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Code[NonNegative] = 0.0,
) -> Algorithm:
    """Agentic Reinforced Policy Optimization (ARPO).

    Episodes of agents fork where a result of a tool made the policy less certain. `initial` of a group's episodes begin
    at the question; after each reply to a result, branches - 1 times, another begins there with the probability

        probability + entropy_weight (H_t - H_0),    H: mean entropy of the first `first_tokens` tokens / log |V|

    H_0 being that of the episode's first reply, until the group has all its samples; missing ones begin at the question
    too. credit: "soft" is GRPO on whole paths, in which a shared token is once in each; "hard" gives shared tokens the
    mean of the advantages of the paths that have them. A success (score > success) with at least bonus_calls calls of
    tools that worked gets tool_bonus, where the paper asks for one of each of its two tools. Then PPO's clip (clip_low,
    clip_high) and kl_coefficient k3, averaged over rows. A reward for the form, -1 without it, is the run's to give.

    This is the released code, but for its entropies of the ten most probable tokens; the paper forks where
    alpha + beta dH is above a threshold. The paper's group has 16 samples. Rollout: `rollouts.agents.fork`.
    """
    steps = [needs_turns(), rescore(paid_for_calls(tool_bonus, bonus_calls, success), {"calls", "failed_calls"})]
    steps += [group_relative(epsilon=epsilon)]
    steps += [revised(mean_over_paths(), {"node"})] if credit == "hard" else []
    return Algorithm(
        chain(*steps),
        clipped_policy(clip_low, clip_high, sequence_mean(), kl_coefficient=kl_coefficient),
        rollout=forking_agents(by_chance(probability, entropy_weight), initial, branches, first_tokens),
    )
