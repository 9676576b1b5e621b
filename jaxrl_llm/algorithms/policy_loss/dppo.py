from typing import Literal

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import Code, Count, OfRun, Paper
from jaxrl_llm.objectives import constant, log_probability, policy_gradient, token_ratio
from jaxrl_llm.objectives.weights import capped, product, within_divergence


@method(paper="arXiv 2602.04879", test="test_weighted.py::test_dppo_is_the_loop")
@beside("top_k", "divergences over the most probable tokens", "those tokens' log-probabilities at sampling")
def dppo(
    divergence: Paper[Literal["kl", "tv"]] = "tv",
    threshold_low: Code[float | None] = None,
    threshold_high: Code[float | None] = None,
    cap: Code[float] = 20.0,
    max_length: OfRun[Count | None] = None,
) -> Algorithm:
    """Divergence Proximal Policy Optimization (Rethinking the Trust Region).

    Masks a token once its probability, rather than its ratio, has moved too far in the direction of its advantage, so
    that rare tokens can become likely. With p, p0 its current and behaviour probability, A_i = r_i - mean_g,

        keep = p - p0 <= threshold_high where A > 0,  p0 - p <= threshold_low where A < 0      (divergence "tv")
        loss = -1/N sum_i 1/max_length sum_t keep sg(min(rho, cap)) A_i logp_it

    divergence "kl": the same with the binary KL(p0 || p) of sampling the token or not. A threshold of None is 0.15 for
    "tv" and 0.05 for "kl". max_length: the generation budget; None: the longest row of the batch. These divergences use
    only the sampled token and are lower bounds of the full ones; the paper's top-K forms are not implemented.
    """
    usual = 0.15 if divergence == "tv" else 0.05
    low, high = (usual if bound is None else bound for bound in (threshold_low, threshold_high))
    weight = product(within_divergence(low, high, divergence), capped(cap))
    objective = policy_gradient(token_ratio(), log_probability(weight), constant(max_length))
    return Algorithm(group_relative("none"), objective)
