"""Information Gain-based Policy Optimization (IGPO)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.advantages.turns.information import information_gains
from jaxrl_llm.advantages.turns.turns import turn_advantages
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import CODE, OURS, PAPER, NonNegative
from jaxrl_llm.objectives import clip, policy_gradient, sequence_mean, token_ratio
from jaxrl_llm.objectives.policy_gradient import regularised
from jaxrl_llm.rollouts.runtime.answer_likelihood import with_answers


@method(
    paper="arXiv 2510.14967",
    year=2025,
    test="test_turn_information.py::test_igpo_worked_example",
    needs={"state_key": "how many turns there are", "turns": "episodes of several turns"},
)
def igpo_information_gain(
    column: Annotated[str, OURS] = "answer",
    opening: Annotated[str, OURS] = "<answer>",
    gamma: Annotated[float, CODE] = 1.0,
    epsilon: Annotated[NonNegative, OURS] = 1e-6,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    kl_coefficient: Annotated[NonNegative, PAPER] = 0.001,
) -> Algorithm:
    """Information Gain-based Policy Optimization (IGPO).

    A turn is rewarded by how much more probable it makes the reference answer a to the policy. With h_t all that comes
    before turn t, observations included, and p_t the geometric mean of the probabilities of the answer's tokens

        p_t = exp(mean_j log pi(a_j | h_t, opening, a_<j)),    r_t = p_{t+1} - p_t,    r_T = the score
        A_t = sum_{u >= t} gamma^(u - t) z_u,    z = (r - mean_g r) / (std_g r + epsilon)

    over all turns of all episodes of the group. A_t is on all tokens of the turn, in PPO's clip (clip_low, clip_high)
    with kl_coefficient k3, averaged over rows. An episode of one turn has the score alone, so that such groups are
    GRPO's; without an answer in `column` of the data set only the score counts. opening: the text before the answer
    that a reply would have. A row that begins anew in the middle of an episode is an episode of its own.

    The answer is read before the update, by one forward pass for each turn. The released code subtracts means over the
    same token index, without a deviation; this is the paper's form. Rollout:
    `rollouts.runtime.answer_likelihood.with_answers`, around the run's agents.
    """
    gains = information_gains(gamma, epsilon)
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), sequence_mean())
    return Algorithm(
        turn_advantages(gains, needs={"answer_logp", "answer_tokens", "state_key"}),
        regularised(objective, sequence_mean(), kl_coefficient=kl_coefficient),
        rollout=with_answers(column, opening),
    )
