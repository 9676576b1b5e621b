"""PPO on whole episodes (A Practitioner's Guide to Multi-turn Agentic RL)."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxrl_llm.advantages.turns.turn_rewards import needs_turns, shared_turn_rewards, turn_rewards_at_the_end
from jaxrl_llm.algorithms.classic.ppo import ppo
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import CODE, OURS, NonNegative
from jaxrl_llm.core.transform import chain
from jaxrl_llm.utils.errors import require_choice


@method(
    paper="arXiv 2510.01132",
    year=2025,
    test="test_turn_values.py::test_multi_turn_recipe_worked_example",
    needs={"turn_rewards": "rewards at the ends of turns", "turns": "episodes of several turns"},
)
def multi_turn_recipe(
    rewards: Annotated[Literal["dense", "sparse"], OURS] = "dense",
    success: Annotated[float, OURS] = 0.0,
    most: Annotated[int | None, OURS] = None,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    value_clip: Annotated[float | None, OURS] = 0.2,
    value_coefficient: Annotated[NonNegative, OURS] = 1.0,
    gamma: Annotated[float, CODE] = 1.0,
    lam: Annotated[float, OURS] = 1.0,
    whiten: Annotated[bool, OURS] = True,
    kl_coefficient: Annotated[NonNegative, CODE] = 0.01,
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
    require_choice("rewards", rewards, ("dense", "sparse"))
    base = ppo(
        clip_low, clip_high, None, value_clip, value_coefficient, gamma, lam, whiten, kl_coefficient=kl_coefficient
    )  # fmt: skip
    placed = shared_turn_rewards(success, most) if rewards == "dense" else turn_rewards_at_the_end()
    return Algorithm(chain(needs_turns(), placed, base.transform), base.objective)
