"""Dyna-GRPO, the second stage of Dyna-Mind."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxrl_llm.advantages.turns.simulations import policy_or_simulation
from jaxrl_llm.advantages.turns.turn_rewards import needs_turns
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import OURS, PAPER, NonNegative
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import clip, policy_gradient, sequence_mean, token_ratio
from jaxrl_llm.objectives.policy_gradient import regularised
from jaxrl_llm.rollouts.agents.lookahead import simulating


@method(
    paper="arXiv 2510.09577",
    year=2025,
    test="test_dyna_grpo.py::test_dyna_grpo_worked_example_and_loop",
    lacks={
        "simulation": (
            "the first stage (ReSim), supervised training on simulated futures in the thoughts",
            "searches in the environment whose texts are trained on",
        )
    },
    needs={
        "episode": "rows of one episode",
        "first_turn": "the order of these rows",
        "turns": "episodes of several turns, whose replies are tried out in copies of the environment",
    },
)
def dyna_grpo(
    depth: Annotated[int, PAPER] = 5,
    policy_steps: Annotated[int, OURS] = 1,
    simulation_steps: Annotated[int, OURS] = 1,
    revealed: Annotated[Literal["removed", "kept"], OURS] = "removed",
    success: Annotated[float, OURS] = 0.0,
    epsilon: Annotated[NonNegative, OURS] = 1e-6,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    kl_coefficient: Annotated[NonNegative, OURS] = 0.04,
) -> Algorithm:
    """Dyna-GRPO, the second stage of Dyna-Mind.

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
    """
    ratio = token_ratio("old" if revealed == "removed" else "behaviour")
    objective = policy_gradient(ratio, clip(clip_low, clip_high), sequence_mean())
    return Algorithm(
        chain(needs_turns(), policy_or_simulation(success, epsilon)),
        regularised(objective, sequence_mean(), kl_coefficient=kl_coefficient),
        rollout=simulating(depth, policy_steps, simulation_steps, revealed),
    )
