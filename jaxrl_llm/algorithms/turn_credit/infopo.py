"""Information-Driven Policy Optimization (InfoPO)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

from jaxrl_llm.advantages.multipliers import revised
from jaxrl_llm.advantages.turns.information import fused_with_feedback
from jaxrl_llm.advantages.turns.turn_rewards import needs_turns
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.hyperparameters import CODE, NonNegative
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.rollouts.runtime.answer_likelihood import with_blanks


@part
def with_feedback(beta: float, temperature: float, epsilon: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N, L]`: the advantages of `infopo`."""
    return lambda batch: fused_with_feedback(batch, beta, temperature, epsilon)


@method(
    paper="arXiv 2603.00656",
    year=2026,
    test="test_turn_information.py::test_infopo_worked_example",
    needs={"state_key": "how many turns there are", "turns": "episodes of several turns"},
    beside={"decay": ("the decay of beta with the epochs, off by default", "a schedule of beta")},
)
def infopo(
    beta: Annotated[NonNegative, CODE] = 0.1,
    gate_temperature: Annotated[float, CODE] = 0.05,
    placeholder: Annotated[str, CODE] = "No information found.",
    epsilon: Annotated[NonNegative, CODE] = 1e-6,
    clip_low: Annotated[NonNegative, CODE] = 0.2,
    clip_high: Annotated[NonNegative, CODE] = 0.2,
) -> Algorithm:
    """Information-Driven Policy Optimization (InfoPO).

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
    """
    check_number("gate_temperature", gate_temperature, above=0)
    check_number("epsilon", epsilon, above=0)
    needs = {"old_logp", "blanked_logp", "blanked", "state_key"}
    return Algorithm(
        chain(needs_turns(), revised(with_feedback(beta, gate_temperature, epsilon), needs)),
        policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean()),
        rollout=with_blanks(placeholder),
    )
