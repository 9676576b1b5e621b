"""Methods that credit turns by what the policy learned in them, from scoring passes in other contexts."""

from __future__ import annotations

from collections.abc import Callable

from jaxrl_llm.advantages.multipliers import revised
from jaxrl_llm.advantages.turns.information import fused_with_feedback, information_gains
from jaxrl_llm.advantages.turns.turn_rewards import needs_turns
from jaxrl_llm.advantages.turns.turns import turn_advantages
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import clip, policy_gradient, sequence_mean, token_mean, token_ratio
from jaxrl_llm.objectives.policy_gradient import regularised
from jaxrl_llm.rollouts.runtime.answer_likelihood import with_answers, with_blanks

__all__ = ["igpo_information_gain", "infopo"]


def igpo_information_gain(
    column: str = "answer",
    opening: str = "<answer>",
    gamma: float = 1.0,
    epsilon: float = 1e-6,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.001,
) -> Algorithm:
    """Information Gain-based Policy Optimization (IGPO, arXiv 2510.14967, 2025).

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

    Defaults. Paper: kl_coefficient. Code: gamma. Ours: column, opening, epsilon, clip_low, clip_high.
    """
    gains = information_gains(gamma, epsilon)
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), sequence_mean())
    return Algorithm(
        turn_advantages(gains, needs={"answer_logp", "answer_tokens", "state_key"}),
        regularised(objective, sequence_mean(), kl_coefficient=kl_coefficient),
        rollout=with_answers(column, opening),
    )


@part
def with_feedback(beta: float, temperature: float, epsilon: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N, L]`: the advantages of `infopo`."""
    return lambda batch: fused_with_feedback(batch, beta, temperature, epsilon)


def infopo(
    beta: float = 0.1,
    gate_temperature: float = 0.05,
    placeholder: str = "No information found.",
    epsilon: float = 1e-6,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Algorithm:
    """Information-Driven Policy Optimization (InfoPO, arXiv 2603.00656, 2026).

    A turn k with tokens a_k also earns what its observation o_k changes in the next one, against the same conversation
    with the `placeholder` in place of o_k, repeated or cut to its length:

        IG_k = mean_{t in a_{k+1}} (log pi(a_t | ..., o_k, ...) - log pi(a_t | ..., placeholder, ...))
        A = A_out + beta sigmoid(-sigma_g / gate_temperature) min(1, max(std A_out, 1) / std A_in) A_in

    A_out = (R - mean_g R) / (sigma_g + epsilon) with the scores' deviation sigma_g, so that the gate closes where
    outcomes already tell episodes apart. A_in are the standard scores of IG_k / |a_k|, once for each token of a_k, over
    those of the group that are not 0, and std is over the tokens of the batch (all with n - 1). The last turn has
    IG = 0, and so has one whose observation begins a new row. Then PPO's clip (clip_low, clip_high), averaged over
    tokens. The released code can let beta decay with the epochs, which it does not by default, and is left out here.

    Each turn but the first costs a forward pass before the update. Rollout:
    `rollouts.runtime.answer_likelihood.with_blanks`, around the run's agents.

    Defaults. Code: beta, gate_temperature, placeholder, epsilon, clip_low, clip_high.
    """
    check_number("gate_temperature", gate_temperature, above=0)
    check_number("epsilon", epsilon, above=0)
    needs = {"old_logp", "blanked_logp", "blanked", "state_key"}
    return Algorithm(
        chain(needs_turns(), revised(with_feedback(beta, gate_temperature, epsilon), needs)),
        policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean()),
        rollout=with_blanks(placeholder),
    )
