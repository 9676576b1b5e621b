from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, method, presets, run_needs, run_settings, several_steps
from jaxrl_llm.core.annotations import AverageName, Code, Gate, NonNegative, Paper
from jaxrl_llm.core.parts import PolicyOutputs, Trajectories, part
from jaxrl_llm.objectives import Average, likelihood_preserving, mean_by, token_mean


@method(paper="arXiv 2512.04220", test="test_regularised.py::test_llds_by_loop")
@run_needs(turns="episodes of several turns")
@run_settings(several_steps("several gradient steps on a batch: at the first no likelihood has fallen"))
@presets(
    paper={"penalty_over": "nonnegative", "kl_coefficient": 0.0, "average": "prompt"},
    code={"penalty_over": "all", "kl_coefficient": 0.001, "average": "token"},
)
def llds(
    coefficient: Paper[NonNegative] = 0.2,
    gate: Paper[Gate] = "turn",
    final: Paper[float] = 1.0,
    penalty_over: Paper[Literal["nonnegative", "all"]] = "nonnegative",
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    kl_coefficient: Paper[NonNegative] = 0.0,
    average: Code[AverageName] = "token",
) -> Algorithm:
    """Lazy Likelihood-Displacement Stabilisation (On GRPO Collapse in Search-R1).

    Adds to GRPO a penalty on tokens that became less likely, so that responses with A >= 0 keep their likelihood:

        loss = GRPO + lambda 1/Z sum_{i in P} sum_t g_it max(0, d_it),   d = log pi_old - log pi

    P the responses with A_i >= 0, including those of groups with equal rewards. The gate g is 1 where the sum of d over
    the token's turn is positive (gate "turn"), over its response ("sequence"), or everywhere ("token"). penalty_over: Z
    counts the tokens of P ("nonnegative", eqs. 4 and 10 of the paper) or of the whole batch ("all", the released code).
    lambda = coefficient; final scales it on the last turn, the answer (the paper's variant MA lowers it).

    GRPO here, with clip_low and clip_high, is a token mean without KL (eq. 1), over the whole batch as in the code;
    average "prompt" is the mean over groups of each group's token mean. The code's script adds 0.001 times k3
    (kl_coefficient). preset "paper" or "code" sets all of these. The penalty is 0 at the first update of a batch:
    set --epochs or --minibatches.
    """
    base = grpo(clip_low, clip_high, kl_coefficient, average=average)
    mean = token_mean() if penalty_over == "all" else nonnegative_mean()
    penalty = likelihood_preserving(gate, final=final, average=mean)
    return Algorithm(base.transform, base.objective + coefficient * penalty)


@part
def nonnegative_mean() -> Average:
    """Sum over all tokens / number of tokens with advantage >= 0 in the batch; 0 if there are none."""

    def count(outputs: PolicyOutputs, batch: Trajectories) -> Trajectories:
        return batch.with_controls(nonnegative_tokens=jnp.sum(batch.loss_weights * (batch.need("advantages") >= 0)))

    return Average(mean_by("nonnegative_tokens"), refresh=count)
