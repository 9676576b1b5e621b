"""C-MORL (Multi-Objective RL through Efficient Discovery of Pareto Front)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import AverageName
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.hyperparameters import CODE, OURS, NonNegative
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives.averaging.averages import average_by_name
from jaxrl_llm.objectives.constraints import log_barrier, starting_means
from jaxrl_llm.objectives.policy_gradient import policy_gradient
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.surrogates import clip
from jaxrl_llm.rewards.compositions import reward_component
from jaxrl_llm.rewards.transforms import rescore


@method(
    paper="arXiv 2410.02236",
    year=2025,
    test="test_reward_composed.py::test_c_morl_is_the_loop",
    lacks={
        "front": (
            "the first policies of the front and the choice of those to extend; a run extends one",
            "runs that share a front",
        )
    },
)
def c_morl(
    component: Annotated[str | None, OURS] = None,
    share: Annotated[float, CODE] = 0.9,
    sharpness: Annotated[float, CODE] = 20.0,
    clip_low: Annotated[NonNegative, CODE] = 0.2,
    clip_high: Annotated[NonNegative, CODE] = 0.2,
    average: Annotated[AverageName, OURS] = "token",
) -> Algorithm:
    """C-MORL (Multi-Objective RL through Efficient Discovery of Pareto Front).

    The extension of a policy on the front: raise one component of the reward, l = `component`, while no other falls
    below a share of its mean under the policy that the run starts from, by an interior-point method:

        loss = -mean min(rho A_l, clip(rho, 1 - clip_low, 1 + clip_high) A_l) - 1/sharpness mean_{i != l} log c_i
        c_i = G_i(pi) - share G_i(pi_start)

    A_l: the component, standardised in its group. component None: the combined reward, with each component as a
    constraint. G_i: the mean of component i, to first order in the policy, see `objectives.constraints`; it must be
    above 0 at the start to constrain anything. Below 0.001 the logarithm goes on along its tangent. average: of the
    first term, see `average_by_name`.

    The released code has c_i = (clip(rho) - share) mean r_i for each step, and stops at 0.001. Then log c_i is
    log mean r_i plus a function of rho alone, whose gradient has the expectation 0 on policy: the rewards would not
    matter, and a violated constraint would have no gradient. So c_i is here derived from the problem that it is to
    solve. The first stage trains policies for fixed weights of the rewards, which is `grpo` with weights; the choice of
    policies to extend, in the sparsest regions of the front, compares runs. Both are out of scope here: a run extends
    the policy that --model names.
    """
    check_number("sharpness", sharpness, above=0)
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), average_by_name(average))
    objective += (1 / sharpness) * log_barrier(component, share, clip_low, clip_high)
    return Algorithm(
        chain(starting_means(component), rescore(reward_component(component)), group_relative()), objective
    )
