"""Methods whose reference policy is not the initial one: an average of models, or a mixture of several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.multipliers import revised
from jaxrl_llm.advantages.returns import generalised_advantages
from jaxrl_llm.algorithms.actor_critic import ppo
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.reference import mixture, soup
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.surrogates import log_probability
from jaxrl_llm.objectives.values import value_loss

__all__ = ["salsa", "tscac"]

Number = float | jax.Array


def names_of(models: str | None) -> list[str]:
    """The models that a text lists, separated by commas; none for None.

    >>> names_of("runs/a, runs/b"), names_of(None)
    (['runs/a', 'runs/b'], [])
    """
    return [name.strip() for name in (models or "").split(",") if name.strip()]


def salsa(
    other: str | None = None,
    share: float = 0.5,
    kl_coefficient: float = 0.05,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    value_clip: float | None = 0.2,
    value_coefficient: float = 1.0,
    gamma: float = 1.0,
    lam: float = 0.95,
    whiten: bool = True,
) -> Algorithm:
    """Soup-based Alignment Learning for Stronger Adaptation (SALSA, arXiv 2411.01798, 2024).

    `ppo` whose reference is a model soup, the average of the weights of two models that were fine-tuned from the same
    pretrained one on different seeds or data:

        theta_ref = share theta_0 + (1 - share) theta_other
        r_t = r 1[t last] - kl_coefficient (logp - logp_ref)_t

    theta_0 are the run's initial weights, from which the policy starts. other: name or folder of the second model (or
    of several, separated by commas, which have equal parts of 1 - share); a run needs it. With share 1 this is `ppo`.
    The soup is nearer to good policies than either model, so that more divergence from it is tolerated. clip_low,
    clip_high, value_clip, value_coefficient, gamma, lam and whiten as in `ppo`.

    Defaults. Code: clip_low, clip_high, value_clip, value_coefficient, gamma, lam, whiten, kl_coefficient. Recalled:
    share. Run: other.
    """
    base = ppo(
        clip_low=clip_low, clip_high=clip_high, value_clip=value_clip, value_coefficient=value_coefficient, gamma=gamma,
        lam=lam, whiten=whiten, kl_coefficient=kl_coefficient,
    )  # fmt: skip
    return replace(base, reference=soup(*names_of(other), share=share, option="other"))


@part
def constrained_weights(multiplier: Number, cap: Number) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N, L]`: the weights w of `tscac`."""

    def weights(batch: Trajectories) -> jax.Array:
        constraint = batch.need("reference_logp") - batch.need("old_logp")
        # The exponent is bounded like log-ratios, so that the weights stay finite.
        exponent = jnp.clip(constraint + batch.need("advantages") / multiplier, -20.0, 20.0)
        return jnp.where(batch.action_mask, jnp.minimum(jnp.exp(exponent), cap), 0.0)

    return weights


def tscac(
    policies: str | None = None,
    multiplier: float = 1.0,
    cap: float = 10.0,
    value_coefficient: float = 1.0,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Algorithm:
    """Two-Stage Constrained Actor-Critic (TSCAC, arXiv 2302.01680, 2023).

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

    Defaults. Code: cap. Ours: multiplier, value_coefficient, gamma, lam. Run: policies.
    """
    check_number("multiplier", multiplier, above=0)
    check_number("cap", cap, above=0)
    transform = chain(
        generalised_advantages(gamma, lam),
        revised(constrained_weights(multiplier, cap), needs={"reference_logp", "old_logp"}),
    )
    objective = policy_gradient(token_ratio(), log_probability(), token_mean())
    return Algorithm(
        transform, objective + value_coefficient * value_loss(None),
        reference=mixture(*names_of(policies), option="policies"),
    )  # fmt: skip
