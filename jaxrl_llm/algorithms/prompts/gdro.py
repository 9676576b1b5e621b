"""Group Distributionally Robust Optimization for LLM reasoning (GDRO)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from jaxrl_llm.advantages.bins import weigh_by_bin
from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import CODE, OURS, PAPER, RUN, Count, NonNegative
from jaxrl_llm.core.transform import chain
from jaxrl_llm.curriculum.bandit_budgets import samples_by_bin
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.scores import least_tried
from jaxrl_llm.utils.errors import require_choice


@method(paper="arXiv 2601.19280", year=2026, test="test_curricula.py::test_gdro_against_a_loop_over_steps")
def gdro(
    controller: Annotated[Literal["weights", "samples"], PAPER] = "weights",
    bins: Annotated[int, PAPER] = 10,
    bandit_rate: Annotated[float, CODE] = 0.1,
    smoothing: Annotated[float, CODE] = 0.1,
    loss_limit: Annotated[float, CODE] = 3.0,
    most_weight: Annotated[float, CODE] = 10.0,
    hysteresis: Annotated[float, CODE] = 0.0,
    uniform_share: Annotated[float, CODE] = 0.15,
    least_samples: Annotated[int, OURS] = 2,
    most_samples: Annotated[int, OURS] = 8,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    kl_coefficient: Annotated[NonNegative, OURS] = 0.04,
    epsilon: Annotated[NonNegative, OURS] = 1e-6,
    prompts: Annotated[Count | None, RUN] = None,
) -> Algorithm:
    """Group Distributionally Robust Optimization for LLM reasoning (GDRO).

    Prompts are in bins by the share of their groups so far that had a success, and one of two controllers favours bins
    in which the policy fails. l is a bin's mean share of failures, 1 - mean reward, among the prompts of the batch.
    controller "weights" (Prompt-GDRO) multiplies GRPO's advantages by the weight of the prompt's bin,

        S <- (1 - smoothing) S + smoothing l
        A <- A min(exp(bandit_rate clip(S, -loss_limit, loss_limit)), most_weight)

    and a prompt changes its bin only if it is `hysteresis` beyond the edge. controller "samples" (Rollout-GDRO) chooses
    the samples of each bin's prompts, n from least_samples to most_samples, with the total of a step unchanged:

        score_b[n] -= l_b    for the n that was used
        p_b = (1 - uniform_share) softmax(bandit_rate score_b) + uniform_share / number of n
        n_b maximise sum_b log p_b(n_b) subject to the total

    In the paper l is GRPO's loss. For samples of the current policy with standardised advantages that is 0 up to
    rounding, so that a bin's weight would depend on the KL penalty alone; the share of failures is ours. The code
    divides the weights by their sum and flips the sign of the bandit's gain; ours follow the paper. The paper's price
    of samples stays 0 because the total is exact. A has the population standard deviation + epsilon; the loss is GRPO's
    with clip_low, clip_high and kl_coefficient. prompts: entries of the table of weights (None: one for each of the
    run).
    """
    require_choice("controller", controller, ("weights", "samples"))
    base = grpo(clip_low, clip_high, kl_coefficient, ddof=0, epsilon=epsilon)
    if controller == "samples":
        budget = samples_by_bin(bins, least_samples, most_samples, bandit_rate, uniform_share)
        return replace(base, curriculum=choose_prompts(least_tried(), budget))
    weights = weigh_by_bin(bins, bandit_rate, smoothing, loss_limit, most_weight, hysteresis, prompts=prompts)
    return replace(base, transform=chain(base.transform, weights))
