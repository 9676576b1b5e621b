"""Step-level Advantage assignment via Trajectory graph (SALT)."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxrl_llm.advantages.turns.turn_rewards import where_given
from jaxrl_llm.advantages.turns.turns import mean_over_equal, of_episode, turn_advantages
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.algorithms.turn_credit.gigpo import clipped
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import OURS, NonNegative


@method(
    paper="arXiv 2510.20022",
    year=2025,
    test="test_turn_credit.py::test_salt_worked_example",
    needs={"state_key": "turns with the same transition", "turns": "episodes of several turns"},
)
def salt(
    history: Annotated[int, OURS] = 0,
    scale: Annotated[Literal["none", "std"], OURS] = "std",
    epsilon: Annotated[NonNegative, OURS] = 1e-6,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    kl_coefficient: Annotated[NonNegative, OURS] = 0.0,
) -> Algorithm:
    """Step-level Advantage assignment via Trajectory graph (SALT).

    A turn that several episodes of a group have in common says little about which of them was better. With A the
    advantages of the episodes, as in GRPO (scale, epsilon), a turn gets the mean

        A_t = mean of A over the turns of the group with the same transition,

    which are equal in their state, the `history` states before that, the tokens of the turn, and the state after it.
    A turn of one episode alone keeps its A, one of all episodes has 0. An episode that repeats a transition counts each
    time. Then PPO's clip (clip_low, clip_high) and kl_coefficient k3, averaged over tokens. The rule is that of
    summaries of the paper; tokens, not texts, are compared.
    """
    episode = of_episode(scale, epsilon=epsilon)
    credit = where_given("state_key", mean_over_equal(episode, history), episode)
    return Algorithm(
        turn_advantages(credit, needs={"state_key"}),
        clipped(clip_low, clip_high, kl_coefficient),
    )
