from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages import discounted_returns
from jaxrl_llm.advantages.group import above_baseline
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AverageName, Baseline, Ours, Paper, Positive
from jaxrl_llm.core.parts import Objective, Trajectories, batch_part, chain, stateless
from jaxrl_llm.objectives import average_by_name, capped, log_probability, policy_gradient, token_ratio
from jaxrl_llm.objectives.surrogates import Surrogate


@batch_part
def minus_baseline(batch: Trajectories, baseline: Literal["batch", "group", "leave_one_out", "none"]) -> Trajectories:
    """A function of the batch that subtracts a baseline of `reinforce` from the advantages."""
    keys = jnp.zeros_like(batch.group) if baseline == "batch" else batch.group
    kind: Baseline = baseline if baseline == "leave_one_out" or baseline == "none" else "mean"
    r = batch.scores
    b = jnp.nan_to_num(r) - above_baseline(r, keys, kind)
    shifted = batch.need("advantages") - jnp.where(jnp.isnan(r), 0.0, b)[:, None]
    return batch.replace(advantages=jnp.where(batch.action_mask, shifted, 0.0))


@method(paper="Machine Learning 8", year=1992, test="test_score_function.py::test_reinforce_is_the_loop")
def reinforce(
    baseline: Ours[Literal["batch", "group", "leave_one_out", "none"]] = "batch",
    gamma: Paper[float] = 1.0,
    average: Paper[AverageName] = "sum",
    importance_cap: Paper[Positive | None] = None,
) -> Algorithm:
    """REINFORCE (Simple statistical gradient-following algorithms; before arXiv).

    The base case: the log-probability of each sampled token, weighted by the return minus a baseline.

        G_t = sum_{s >= t} gamma^(s - t) r_s,    A_t = G_t - b,    loss = -1/N sum_i sum_t A_t log pi(a_t)

    baseline: b is the mean score of the batch ("batch"), of the prompt's group ("group"), of the group's other samples
    ("leave_one_out"), or 0 ("none"). gamma: discount per token; the score is the last token's reward. average: "sum"
    (the gradient of the sequence's log-probability), "token", "sequence" (each divided by its length), or another of
    `average_by_name`. importance_cap: weights min(pi / pi_behaviour, cap) under stop-gradient, for off-policy data;
    None: no weights.
    """
    weight = None if importance_cap is None else capped(importance_cap)
    objective = averaged_gradient(log_probability(weight), average)

    return Algorithm(chain(discounted_returns(gamma), stateless(minus_baseline(baseline))), objective)


def averaged_gradient(surrogate: Surrogate, average: AverageName) -> Objective:
    """The policy gradient with token ratios and an average given by name (`average_by_name`)."""
    return policy_gradient(token_ratio(), surrogate, average_by_name(average))
