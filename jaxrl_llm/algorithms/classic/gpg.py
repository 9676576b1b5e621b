from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages.filters import mixed_groups, uniform_groups
from jaxrl_llm.advantages.group import group_advantage, on_actions
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.algorithm import DynamicSampling
from jaxrl_llm.core.annotations import Code, NonNegative, Ours, Paper, Scale
from jaxrl_llm.core.parts import Array, Trajectories, batch_part
from jaxrl_llm.objectives import log_probability, policy_gradient, token_mean, token_ratio


@batch_part
def rescaled_to_informative(batch: Trajectories, scale: Scale, epsilon: float, counted_by: str) -> Array:
    """A function `batch -> f32[N]`: the advantages of `gpg`."""
    r = batch.scores
    known = ~jnp.isnan(r)
    valid = known & (~uniform_groups(batch) if counted_by == "variance" else r != 0)
    alpha = jnp.sum(known) / jnp.maximum(jnp.sum(valid), 1)
    return alpha * group_advantage(r, batch.group, scale=scale, epsilon=epsilon)


@method(paper="arXiv 2504.02546", test="test_score_function.py::test_gpg_is_the_loop")
def gpg(
    scale: Paper[Scale] = "none",
    epsilon: Code[NonNegative] = 1e-6,
    counted_by: Paper[Literal["variance", "nonzero"]] = "variance",
    resample: Ours[bool] = False,
) -> Algorithm:
    """Group Policy Gradient (GPG: A Simple and Strong Reinforcement Learning Baseline).

    The policy gradient with the group mean as baseline, rescaled for the samples that carry no gradient:

        A_i = alpha (r_i - mean_g) / F,    alpha = B / (B - M),    loss = -sum A log pi(a_t) / tokens

    M of the batch's B responses are in groups of equal rewards. F is 1 (scale "none") or the group's standard deviation
    + epsilon ("std"). counted_by "variance" is this definition; with "nonzero" B - M counts the responses whose reward
    is not 0, as in verl, which differs from it. resample: replace groups without variance by sampling more prompts (the
    paper does so when the share of valid samples is below 0.6).
    """
    objective = policy_gradient(token_ratio(), log_probability(), token_mean())
    curriculum = DynamicSampling(mixed_groups) if resample else None
    return Algorithm(on_actions(rescaled_to_informative(scale, epsilon, counted_by)), objective, curriculum)
