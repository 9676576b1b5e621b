import jax.numpy as jnp

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, FractionNumber, NonNegative, Number, Source, ZeroOrOne
from jaxrl_llm.core.log_ratios import absolute
from jaxrl_llm.core.parts import Array, Metrics, PolicyOutputs, Trajectories, step_part, surrogate_part
from jaxrl_llm.objectives import policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.covariance import first_k, token_covariances
from jaxrl_llm.objectives.ratios import log_ratio_to
from jaxrl_llm.selection.rows import share_down, token_noise


@method(paper="arXiv 2505.22617", test="test_trust_region.py::test_kl_cov_by_loop")
def kl_cov(
    share: Code[float] = 2e-4,
    kl_coefficient: Code[NonNegative] = 1.0,
    ddof: Code[ZeroOrOne] = 1,
    epsilon: Code[NonNegative] = 1e-6,
) -> Algorithm:
    """KL-Cov (The Entropy Mechanism of RL for Reasoning Language Models).

    No clip: loss = token mean of -rho A, plus beta |log pi - log pi_old| on the max(1, floor(share n)) of n
    tokens with the highest covariance (A - mean A)(log pi - mean log pi) in the batch. beta = kl_coefficient (verl's
    YAML has 0.1); the paper's 7B runs have share 2e-3. A is GRPO's, with ddof and epsilon. At the first update of a
    batch the penalty has no gradient.
    """
    penalty = penalise_covariant(kl_coefficient)
    objective = policy_gradient(token_ratio(), penalty, token_mean(), refresh=mark_covariant(share), needs={"old_logp"})
    return Algorithm(group_relative(ddof=ddof, epsilon=epsilon), objective)


@step_part
def mark_covariant(outputs: PolicyOutputs, batch: Trajectories, share: FractionNumber) -> Trajectories:
    """Mark the max(1, floor(share n)) of n tokens with the highest covariance; ties are broken at random.

    Writes info["covariant"] bool[N, L].
    """
    counts = batch.loss_weights != 0
    order = (-token_covariances(outputs, batch), token_noise(batch, 0))
    return batch.with_info(covariant=first_k(order, counts, jnp.maximum(1.0, share_down(jnp.sum(counts), share))))


@surrogate_part
def penalise_covariant(
    ratio: Array, outputs: PolicyOutputs, batch: Trajectories, coefficient: Number, against: Source = "old"
) -> tuple[Array, Metrics]:
    """rho A, minus coefficient |logp - logp_against| on the tokens of info["covariant"].

    Against "old", at the first update of a batch the penalty is 0 and has no gradient: it needs `old_logp`.
    """
    marked = batch.need("covariant").astype(jnp.float32)
    penalty = marked * absolute(log_ratio_to(outputs, batch, against))
    return ratio * batch.need("advantages") - coefficient * penalty, {"covariant": marked}
