"""Methods of agents that try episodes, or single replies, again with what they have learnt of them."""

from __future__ import annotations

from typing import Literal

from jaxrl_llm.advantages.turns.retries import amplified, from_pivot
from jaxrl_llm.advantages.turns.simulations import policy_or_simulation
from jaxrl_llm.advantages.turns.turn_rewards import needs_turns
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import clip, kl, log_probability, policy_gradient, sequence_mean, token_mean, token_ratio
from jaxrl_llm.objectives.policy_gradient import regularised
from jaxrl_llm.rollouts.agents.lookahead import simulating
from jaxrl_llm.rollouts.agents.reflect import reflecting
from jaxrl_llm.utils.errors import is_off

__all__ = ["dyna_grpo", "r3l"]


def r3l(
    alpha: float = 3.0,
    full_reward: float = 1.0,
    baseline: Literal["mean", "log_mean_exp"] = "mean",
    temperature: float = 1.0,
    kl_coefficient: float = 0.0,
    reflection_tokens: int = 4096,
) -> Algorithm:
    """Reflect-then-Retry Reinforcement Learning (R3L, arXiv 2601.03715, 2026).

    Of a group's episodes with an environment half are ordinary. The policy reflects on each of these, in at most
    reflection_tokens tokens, names the step p that should have been another one, and makes a suggestion; then the
    episode is replayed up to p, in a fresh environment, and goes on with the suggestion in its context
    (`rollouts.agents.reflect.reflecting`). It is trained on without the suggestion. Both the episode and its retry are
    trained on from p on alone, where they differ. With b the mean of the group's rewards (0 in a group of one; baseline
    "log_mean_exp": temperature log mean exp(r / temperature))

        A_i = 1 if r_i >= full_reward,    alpha (r_i - b) if r_i >= b,    r_i - b otherwise
        loss = -1/(1 + temperature) mean_t A log pi + kl_coefficient mean_t k2

    over the tokens that are trained on: no ratio and no clip. A retry that reaches full_reward, with more reward or
    fewer replies than before, adds the reflection and the retry with its suggestion; so does a reflection that rightly
    finds nothing to improve. Each is a group of its own with the reward full_reward, which imitates it. A reflection
    that cannot be read, or finds nothing, costs the group no sample: an episode of its own takes the retry's place.

    The words of reflection and suggestion are ours, the latter before the observation of step p. Not included: the
    variant in which each turn is a sample of its own, and the released code's queue of experiences of earlier steps.

    Defaults. Paper: alpha. Code: full_reward, baseline, temperature, reflection_tokens. Ours: kl_coefficient.
    """
    objective = policy_gradient(token_ratio(), log_probability(), token_mean()) / (1 + temperature)
    if not is_off(kl_coefficient):
        objective += kl_coefficient * kl(estimator="k2")
    return Algorithm(
        chain(needs_turns(), amplified(alpha, full_reward, baseline, temperature), from_pivot()),
        objective,
        rollout=reflecting(full_reward, reflection_tokens),
    )


def dyna_grpo(
    depth: int = 5,
    policy_steps: int = 1,
    simulation_steps: int = 1,
    revealed: Literal["removed", "kept"] = "removed",
    success: float = 0.0,
    epsilon: float = 1e-6,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.04,
) -> Algorithm:
    """Dyna-GRPO, the second stage of Dyna-Mind (arXiv 2510.09577, 2025).

    Phases of training steps alternate. In policy_steps steps it is GRPO on whole episodes. In the next simulation_steps
    each group has as many refined episodes beside its G ordinary ones: the policy replies with an action and, between
    <plan> and </plan>, those that it plans after it; the first `depth` of them are tried out in a copy of the
    environment; it sees what followed, replies again, and the episode goes on with that
    (`rollouts.agents.lookahead.simulating`). Refined replies alone are trained on, with

        A_i = 1 if R_i > success and R_i > max(mean R of the ordinary, mean R of the refined episodes), else 0

    in GRPO's objective: the clipped ratio (clip_low, clip_high), averaged over the tokens of each row and then over
    rows, and kl_coefficient k3. revealed: whether refined replies are trained on in the episode as it went on, without
    the states that they were told ("removed", so that the policy learns to foresee them; the ratio is to the weights
    before the update), or with these in their prompt ("kept"). What we read of the paper does not say which. Rewards
    are the environment's to give: the paper's are 10 for a success, 0 for a failure, -0.1 for each step before.

    The first stage, supervised training on replies that were written from search trees, is not part of this; a policy
    that writes no plans has simulations of one action.

    Defaults. Paper: depth. Ours: policy_steps, simulation_steps, revealed, success, epsilon, clip_low, clip_high,
    kl_coefficient.
    """
    ratio = token_ratio("old" if revealed == "removed" else "behaviour")
    objective = policy_gradient(ratio, clip(clip_low, clip_high), sequence_mean())
    return Algorithm(
        chain(needs_turns(), policy_or_simulation(success, epsilon)),
        regularised(objective, sequence_mean(), kl_coefficient=kl_coefficient),
        rollout=simulating(depth, policy_steps, simulation_steps, revealed),
    )
