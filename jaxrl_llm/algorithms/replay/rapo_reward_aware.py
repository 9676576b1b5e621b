"""Reward-Aware Policy Optimization (RAPO, Fathom-DeepResearch)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.advantages.replayed import rescale_to_informative
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import OURS, PAPER, Fraction, NonNegative, ZeroOrOne
from jaxrl_llm.core.transform import chain
from jaxrl_llm.curriculum.pruning import epochs_without_solved
from jaxrl_llm.objectives import clip, policy_gradient, sequence_mean, token_ratio
from jaxrl_llm.replay.into_groups import none_above, swapped_successes


@method(
    paper="arXiv 2509.24107",
    year=2025,
    test="test_replayed.py::test_rapo_worked_example_and_loop",
    lacks={"step_rewards": ("the second stage's reward for single calls of tools", "a judge of calls")},
)
def rapo_reward_aware(
    solved: Annotated[Fraction, PAPER] = 0.9,
    success: Annotated[float, PAPER] = 0.5,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    ddof: Annotated[ZeroOrOne, PAPER] = 0,
    epsilon: Annotated[NonNegative, OURS] = 1e-6,
    accuracy: Annotated[str | None, OURS] = None,
) -> Algorithm:
    """Reward-Aware Policy Optimization (RAPO, Fathom-DeepResearch).

    GRPO with three repairs for groups of equal rewards:

        at the end of an epoch prompts are dropped whose share of samples with r > success is at least `solved`
        A = N/N_good (r - mean_g)/(std_g + epsilon), N_good of the N groups with std_g > 0
        if no sample of prompt q has r > success, a random one is replaced by the latest earlier one that has

    before advantages are computed. A stored completion keeps the log-probabilities of the policy that sampled it, to
    which rho is relative; loss: the sequence mean of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A). ddof 0: the
    population's deviation. The paper writes G/G_good with G_good a number of groups, so G must be their number too. Its
    solve rate counts r > 0, which with its reward for format is true of any well-formed answer: here it is r > success.
    accuracy: the reward that r stands for in these rules; None: the combined one. The first stage's reward is the run's
    --rewards, 0.1 for format and 0.9 for the answer. In runs with --tools or --environment a stored success is an
    episode with its observations, which stay masked. Not here: the second stage's reward for single calls of tools,
    whose labels a judge gives.
    """
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), sequence_mean())
    transform = chain(group_relative(ddof=ddof, epsilon=epsilon), rescale_to_informative())
    replay = swapped_successes(none_above(success), success, 1, "random", accuracy)
    return Algorithm(transform, objective, epochs_without_solved(solved, success, accuracy), replay=replay)
