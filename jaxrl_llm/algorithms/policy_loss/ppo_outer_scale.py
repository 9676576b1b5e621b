import dataclasses

from jaxrl_llm.algorithms.classic.ppo import ppo
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import BelowOne, NonNegative, Ours, Paper, Positive
from jaxrl_llm.core.outer_loop import outer_step


@method(paper="arXiv 2603.06009", test="test_outer_loops.py::test_ppo_outer_scale_by_loop")
def ppo_outer_scale(
    scale: Ours[Positive] = 0.5,
    momentum: Ours[BelowOne] = 0.0,
    test_from: Ours[int | None] = None,
    factor: Paper[Positive] = 5.0,
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.2,
    lam: Paper[float] = 0.95,
    kl_coefficient: Ours[NonNegative] = 0.0,
) -> Algorithm:
    """PPO with a scaled outer step.

    PPO is an outer loop whose step is a round of rollouts with all gradient steps on them, from theta to theta_hat, and
    learning stagnates where that step is too large for the noise of the round's samples. Here the step is explicit:

        v <- momentum v + (theta_hat - theta),    theta <- theta + scale v

    test_from: the paper's test for stagnation, in the run: from that round on, `scale` is divided by `factor`. If the
    reward rises again, what held it up was the step's noise, and more samples a round or a smaller scale help; else
    something else was. As samples a round grow, let minibatches grow in number, not in size (minibatches), and keep the
    learning rate. The paper scales its batches; the explicit step is a reading of its outer loop.
    clip_low, clip_high, lam and kl_coefficient are those of `ppo`, which all else is.
    """
    base = ppo(clip_low, clip_high, lam=lam, kl_coefficient=kl_coefficient)
    return dataclasses.replace(base, outer=outer_step(scale, momentum, 1, test_from, factor))
