"""Entropy-regularized Policy Optimization for multi-turn agents (EPO)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import AverageName
from jaxrl_llm.core.hyperparameters import CODE, PAPER, RUN, AtLeastOne, NonNegative
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives.entropy_history import corridor_of_history, smoothed_entropy


@method(
    paper="arXiv 2509.22576",
    year=2025,
    test="test_regularised.py::test_epo_by_loop",
    needs={"turns": "episodes of several turns"},
)
def epo(
    entropy_coefficient: Annotated[NonNegative, PAPER] = 0.001,
    smoothing: Annotated[float, PAPER] = 0.1,
    corridor_low: Annotated[float, PAPER] = 0.0,
    corridor_high: Annotated[float, PAPER] = 2.0,
    decay: Annotated[NonNegative, CODE] = 3.0,
    clip_low: Annotated[NonNegative, CODE] = 0.2,
    clip_high: Annotated[NonNegative, CODE] = 0.2,
    kl_coefficient: Annotated[NonNegative, CODE] = 0.01,
    average: Annotated[AverageName, CODE] = "token",
    total_steps: Annotated[AtLeastOne | None, RUN] = None,
) -> Algorithm:
    """Entropy-regularized Policy Optimization for multi-turn agents (EPO).

    loss = GRPO - lambda (L_H - beta_k L_smooth): an entropy bonus L_H, averaged over the tokens of a turn, then over
    turns, then over trajectories, and a penalty, averaged the same way, on token entropies outside a corridor around
    Hbar, the mean token entropy of the run so far:

        L_smooth = mean of alpha [max(0, k_l Hbar - H) + max(0, H - k_r Hbar)],  beta_k = 1 + exp(-g k / floor(K / 2))

    lambda = entropy_coefficient, alpha = smoothing (0.05 for ScienceWorld), k_l = corridor_low, k_r = corridor_high,
    g = decay, K = total_steps (150 where None), k the number of updates so far. L_smooth is 0 before the first update.
    The rest is GRPO with clip_low, clip_high, kl_coefficient (k3) and average (`grpo`'s).

    The released code penalises with a constant outside the corridor, which has no gradient, and bounds the loss of bad
    actions by 3 |A|. The hinge here is the paper's. According to the code's configuration its g is the paper's.
    """
    base = grpo(clip_low=clip_low, clip_high=clip_high, kl_coefficient=kl_coefficient, average=average)
    total = 150 if total_steps is None else total_steps
    corridor = corridor_of_history(corridor_low, corridor_high, smoothing, total, decay)
    return Algorithm(chain(base.transform, corridor), base.objective - entropy_coefficient * smoothed_entropy())
