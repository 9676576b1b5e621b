"""Reflect-then-Retry Reinforcement Learning (R3L)."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxrl_llm.advantages.turns.retries import amplified, from_pivot
from jaxrl_llm.advantages.turns.turn_rewards import needs_turns
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import CODE, OURS, PAPER, NonNegative, Positive
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import kl, log_probability, policy_gradient, token_mean, token_ratio
from jaxrl_llm.rollouts.agents.reflect import reflecting
from jaxrl_llm.utils.errors import is_off


@method(
    paper="arXiv 2601.03715",
    year=2026,
    test="test_agent_retries.py::test_r3l_worked_example_and_loop",
    needs={
        "episode": "rows of one episode",
        "first_turn": "the order of these rows",
        "turns": "episodes of several turns, which are tried again from one of them",
    },
    beside={
        "queue": ("the queue of earlier experiences", "a store of retries"),
        "steps": ("the variant that retries step by step", "retries of single steps"),
    },
)
def r3l(
    alpha: Annotated[NonNegative, PAPER] = 3.0,
    full_reward: Annotated[float, CODE] = 1.0,
    baseline: Annotated[Literal["mean", "log_mean_exp"], CODE] = "mean",
    temperature: Annotated[Positive, CODE] = 1.0,
    kl_coefficient: Annotated[NonNegative, OURS] = 0.0,
    reflection_tokens: Annotated[int, CODE] = 4096,
) -> Algorithm:
    """Reflect-then-Retry Reinforcement Learning (R3L).

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
    """
    objective = policy_gradient(token_ratio(), log_probability(), token_mean()) / (1 + temperature)
    if not is_off(kl_coefficient):
        objective += kl_coefficient * kl(estimator="k2")
    return Algorithm(
        chain(needs_turns(), amplified(alpha, full_reward, baseline, temperature), from_pivot()),
        objective,
        rollout=reflecting(full_reward, reflection_tokens),
    )
