"""Hierarchy-of-Groups Policy Optimization (HGPO)."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxrl_llm.advantages.turns.turn_rewards import where_given
from jaxrl_llm.advantages.turns.turns import nested_states, of_episode, turn_advantages, turn_returns
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.algorithms.turn_credit.gigpo import clipped
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import CODE, OURS, NonNegative


@method(
    paper="arXiv 2602.22817",
    year=2026,
    test="test_turn_credit.py::test_hgpo_worked_example",
    needs={"state_key": "turns that begin in the same states", "turns": "episodes of several turns"},
)
def hgpo(
    depth: Annotated[int, CODE] = 2,
    alpha: Annotated[NonNegative, CODE] = 1.0,
    with_episode: Annotated[bool, CODE] = False,
    gamma: Annotated[float, OURS] = 0.95,
    scale: Annotated[Literal["none", "std"], CODE] = "none",
    epsilon: Annotated[NonNegative, CODE] = 1e-6,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    kl_coefficient: Annotated[NonNegative, OURS] = 0.01,
) -> Algorithm:
    """Hierarchy-of-Groups Policy Optimization (HGPO).

    A turn is compared with those of its group that share its state and the states before it, at each length of this
    history. With G_t the return from turn t on, discounted by gamma, and h_k the turns with the same last k states

        A_t = sum_k w_k (G_t - mean_{h_k} G),    w_k = (k + 1)^alpha / (sum of these + epsilon),    k = 1 ... depth + 1

    over the k whose h_k has another turn and whose difference is not 0; 0 where there is none. with_episode: k = 0 is
    the episode's return less the mean of its group's. scale "std" divides each difference by its standard deviation (n,
    for k = 0 n - 1) + epsilon. The loss is PPO's clip (clip_low, clip_high) and kl_coefficient k3, averaged over
    tokens. The weights are the released code's; its scripts also have depth 4.
    """
    episode = of_episode(scale, epsilon=epsilon) if with_episode else None
    nested = nested_states(turn_returns(gamma), depth, alpha, scale, epsilon, episode)
    return Algorithm(
        turn_advantages(where_given("state_key", nested, of_episode(scale, epsilon=epsilon)), needs={"state_key"}),
        clipped(clip_low, clip_high, kl_coefficient),
    )
