"""Advantage-guided policy regularisation (A2PR for Offline RL)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.advantages.replayed import cloned_rows, relative_to_own
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.hyperparameters import OURS, PAPER, NonNegative, NonNegativeInt, ZeroOrOne
from jaxrl_llm.objectives import by_rows, clip, imitation, policy_gradient, token_mean, token_ratio
from jaxrl_llm.replay.into_groups import best_of_prompt


@method(
    paper="arXiv 2405.19909",
    year=2024,
    test="test_replayed.py::test_a2pr_is_the_loop",
    beside={"generator": ("twin critics, the generator of actions, and its weight 2", "a critic of actions")},
)
def a2pr(
    alpha: Annotated[NonNegative, PAPER] = 2.5,
    replay_prompts: Annotated[NonNegativeInt, OURS] = 4096,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    ddof: Annotated[ZeroOrOne, OURS] = 1,
    epsilon: Annotated[NonNegative, OURS] = 1e-6,
) -> Algorithm:
    """Advantage-guided policy regularisation (A2PR for Offline RL).

    The paper clones the better of two actions, the data set's and one that is generated near the policy, and only where
    it is better than V. For completions, the two are the best stored and the best fresh answer to a prompt:

        loss = token mean of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)  over fresh completions
               - 1/alpha mean over the tokens of all y*_q of log pi,  y*_q the best answer if r(y*_q) > mean_g

    A is GRPO's among fresh completions, with ddof and epsilon; mean_g, in place of V(s), is theirs too, so that the
    present policy is the measure of a stored answer. A fresh answer wins ties, and equal fresh ones share the weight.
    The paper weighs its policy loss by alpha, here the other term by 1/alpha. The store has one answer for each of
    replay_prompts prompts. Not here: twin critics, the generator, and its weight 2 where both advantages are positive.
    """
    check_number("alpha", alpha, above=0)
    fresh = by_rows(otherwise=token_mean(), replayed=0.0 * token_mean())
    cloned = by_rows(otherwise=0.0 * token_mean(), cloned=token_mean())
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), fresh, needs={"replayed"})
    objective += imitation(cloned_rows, cloned) / alpha
    return Algorithm(relative_to_own(ddof, epsilon), objective, replay=best_of_prompt(replay_prompts))
