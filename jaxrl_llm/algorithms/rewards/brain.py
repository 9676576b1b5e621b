"""Bayesian Reward-conditioned Amortized Inference (BRAIn)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import OURS
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives.preference.listwise import tilted_targets


@method(paper="arXiv 2402.02479", year=2024, test="test_reward_composed.py::test_brain_worked_example_and_loop")
def brain(reward_temperature: Annotated[float, OURS] = 1.0, scale: Annotated[float, OURS] = 1.0) -> Algorithm:
    """Bayesian Reward-conditioned Amortized Inference (BRAIn).

    The policy learns the posterior of the reference given a good reward, p(y|x) exp(r/gamma), from the samples y_i of a
    prompt, drawn from q, the policy that sampled them:

        a = softmax_i(log p(y_i) + r_i/gamma - log q(y_i)),   b = softmax_i(scale (log pi(y_i) - log q(y_i)))
        loss = mean over prompts of -sum_i a_i log b_i

    with sums over the tokens of a sequence. The gradient is sum_i (b_i - a_i) grad log pi(y_i) (times scale): weighted
    samples minus a self-normalised baseline. gamma = reward_temperature; p the reference. Long sequences make the
    softmax peaky; a scale below 1 tempers the policy's. With two samples, q = p and a = (1, 0), the loss is DPO's with
    beta = scale. A prompt with one sample teaches nothing.
    """
    return Algorithm(chain(), tilted_targets(reward_temperature, scale))
