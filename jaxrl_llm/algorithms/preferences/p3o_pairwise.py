"""Pairwise Proximal Policy Optimization (P3O)."""

from __future__ import annotations

from typing import Annotated, Literal

from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import OURS, NonNegative
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives.preference.listwise import pairwise_policy


@method(paper="arXiv 2310.00212", year=2023, test="test_reward_composed.py::test_p3o_is_the_loop_over_pairs")
def p3o_pairwise(
    kl_coefficient: Annotated[NonNegative, OURS] = 0.05,
    clip_range: Annotated[float, OURS] = 0.2,
    clip: Annotated[Literal["separate", "joint", "none"], OURS] = "separate",
) -> Algorithm:
    """Pairwise Proximal Policy Optimization (P3O).

    A policy gradient on the difference of the rewards of two responses to a prompt, which no shift of the rewards of a
    prompt changes. With R = r - kl_coefficient log(pi_old(y)/pi_ref(y)), D = R_1 - R_2, w = pi(y)/pi_old(y) of whole
    responses, and e = clip_range, the loss is minus the mean over the pairs of a prompt of

        "separate"  [min(w_1 a_1, clip(w_1, 1-e, 1+e) a_1) + min(w_2 a_2, clip(w_2, 1-e, 1+e) a_2)]/2,
                    a_1 = D sg(w_2), a_2 = -D sg(w_1)
        "joint"     min(c u, c clip(u, -e, e))/2,  u = log w_1 - log w_2,  c = D sg(w_1 w_2)
        "none"      D sg(w_1 w_2) u/2

    as clip says. On policy all have the gradient D grad(log pi(y_1) - log pi(y_2))/2. The paper has two responses to a
    prompt; here all pairs of a group count. The clipped forms are derived from the pairwise gradient, not read.
    """
    return Algorithm(chain(), pairwise_policy(clip_range, clip, kl_coefficient))
