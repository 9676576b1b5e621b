import jax.numpy as jnp

from jaxrl_llm.advantages import generalised_advantages, revised
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.algorithms.regularisation.salsa import listed_models
from jaxrl_llm.core.annotations import Code, NonNegative, Number, OfRun, Ours, Positive
from jaxrl_llm.core.parts import Array, Trajectories, batch_part, chain, part
from jaxrl_llm.core.reference import Mixture, ReferenceRule, model_names
from jaxrl_llm.objectives import log_probability, policy_gradient, token_mean, token_ratio, value_loss


@batch_part
def constrained_weights(batch: Trajectories, multiplier: Number, cap: Number) -> Array:
    """A function `batch -> f32[N, L]`: the weights w of `tscac`."""
    constraint = batch.need("reference_logp") - batch.need("old_logp")
    # The exponent is bounded like log-ratios, so that the weights stay finite.
    exponent = jnp.clip(constraint + batch.need("advantages") / multiplier, -20.0, 20.0)
    return jnp.where(batch.action_mask, jnp.minimum(jnp.exp(exponent), cap), 0.0)


@method(paper="arXiv 2302.01680", test="test_moving_reference.py::test_tscac_is_its_loop")
def tscac(
    policies: OfRun[str | None] = None,
    multiplier: Ours[Positive] = 1.0,
    cap: Code[Positive] = 10.0,
    value_coefficient: Ours[NonNegative] = 1.0,
    gamma: Ours[float] = 1.0,
    lam: Ours[float] = 0.95,
) -> Algorithm:
    """Two-Stage Constrained Actor-Critic (TSCAC).

    Several rewards in two stages. Stage 1: one policy pi_i for each auxiliary reward, by any method: a run of its own,
    exported. Stage 2, this method: maximise the main reward while staying near all of them,

        max E[A(s, a)]  subject to  KL(pi || pi_i) <= eps_i
        pi* ~ prod_i pi_i^(lambda_i / Lambda) exp(A / Lambda),    Lambda = sum_i lambda_i

    which is learnt by weighted likelihood of the samples of the policy before the update, beta:

        w_t = min(prod_i (pi_i / beta)^(lambda_i / Lambda) exp(A_t / Lambda), cap);    loss = -mean_t sg(w_t) log pi_t

    plus value_coefficient times the critic's loss. All lambda_i are equal, as in the paper, so that only their sum
    Lambda = multiplier matters. The policies are the run's reference, a geometric mixture. A_t by `gae` with gamma and
    lam; each token is an action. policies: names or folders of the models, separated by commas; a run needs them.
    The paper is about recommendation, where lambda is about 1e-4 on its scale of rewards; here 1 suits rewards of 0
    and 1. Its code truncates ratios at 1 or 10.
    """
    transform = chain(
        generalised_advantages(gamma, lam),
        revised(constrained_weights(multiplier, cap), needs={"reference_logp", "old_logp"}),
    )
    objective = policy_gradient(token_ratio(), log_probability(), token_mean())
    return Algorithm(
        transform, objective + value_coefficient * value_loss(None),
        reference=mixture(*listed_models(policies), option="policies"),
    )  # fmt: skip


@part
def mixture(*models: str, option: str | None = None) -> ReferenceRule:
    """The geometric mixture of other models in equal parts: log p = mean_i log p_i, without its normaliser.

    The initial policy is not part of it. option: see `ReferenceRule`.
    """
    return ReferenceRule(
        lambda initial, others: Mixture(tuple(others), tuple(1 / len(others) for _ in others)),
        models=model_names(models), option=option,
    )  # fmt: skip
