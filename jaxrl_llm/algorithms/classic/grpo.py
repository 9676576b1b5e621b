from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AboveOne, AverageName, Code, Count, NonNegative, OfRun, Paper, Scale, ZeroOrOne
from jaxrl_llm.core.buckets import bucket_moments
from jaxrl_llm.core.parts import Trajectories, chain, stateless_part
from jaxrl_llm.objectives import average_by_name, clipped_policy


@method(paper="arXiv 2402.03300", test="test_grpo.py::test_worked_example")
def grpo(
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    kl_coefficient: Paper[NonNegative] = 0.04,
    entropy_coefficient: Paper[NonNegative] = 0.0,
    scale: Paper[Scale] = "std",
    ddof: Code[ZeroOrOne] = 1,
    epsilon: Code[NonNegative] = 1e-6,
    average: Paper[AverageName] = "sequence",
    dual_clip: Paper[AboveOne | None] = None,
    group_of_one: Code[Literal["zero", "reward"]] = "zero",
    max_length: OfRun[Count | None] = None,
) -> Algorithm:
    """Group Relative Policy Optimization (DeepSeekMath).

    A_i = (r_i - mean_g) / (std_g + epsilon), on every token of sample i of group g, and with rho the token's ratio

        loss = -1/G sum_i 1/|o_i| sum_t [min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) - beta k3]

    averaged over the groups, k3 = exp(-l) - 1 + l with l = logp - logp_ref, beta = kl_coefficient (paper: 0.04; at 0 no
    reference policy is loaded). entropy_coefficient >= 0: entropy bonus. scale "none" does not divide by the standard
    deviation. The paper does not say which standard deviation; verl, TRL and Tunix use ddof 1, with epsilon 1e-6 (TRL:
    1e-4). Nor does it print the clip range.

    Where implementations differ from the paper: average, see `objectives.averages.average_by_name`: the
    paper's "sequence"; "token" in verl and TRL today; "prompt"; "sum"; "constant", by max_length; "slice". dual_clip c
    > 1 bounds the loss of bad actions by c |A| (verl: 3). group_of_one: the advantage of the only sample of a group,
    "zero" (TRL) or its "reward" (verl).
    """
    mean = average_by_name(average, max_length)
    objective = clipped_policy(
        clip_low, clip_high, mean, dual=dual_clip, kl_coefficient=kl_coefficient,
        entropy_coefficient=entropy_coefficient,
    )  # fmt: skip
    credit = group_relative(scale, ddof=ddof, epsilon=epsilon)
    return Algorithm(credit if group_of_one == "zero" else chain(credit, reward_of_singles()), objective)


@stateless_part()
def reward_of_singles(batch: Trajectories) -> Trajectories:
    """Set the advantage of the only scored sample of a group to its reward."""
    count, _, _ = bucket_moments(batch.group, batch.scores)
    single = (count == 1) & ~jnp.isnan(batch.scores)
    reward = jnp.where(single, batch.scores, 0.0)[:, None] * batch.action_mask
    return batch.replace(advantages=jnp.where(single[:, None], reward, batch.need("advantages")))
