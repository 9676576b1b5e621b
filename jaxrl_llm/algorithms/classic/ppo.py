from typing import Literal

from jaxrl_llm.advantages import adaptive_kl, generalised_advantages, kl_reward, normalised_values, whiten_advantages
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AboveOne, Code, Estimator, NonNegative, Ours, Paper, Positive
from jaxrl_llm.core.parts import Transform, chain
from jaxrl_llm.objectives import clipped_policy, entropy, kl, value_loss
from jaxrl_llm.utils.errors import is_off


def chain_present(*parts: Transform | None) -> Transform:
    """Chain the transforms that are not None."""
    return chain(*(part for part in parts if part is not None))


@method(paper="arXiv 1707.06347", test="test_actor_critic.py::test_ppo_is_its_loop")
def ppo(
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.2,
    dual_clip: Paper[AboveOne | None] = None,
    value_clip: Code[Positive | None] = 0.2,
    value_coefficient: Code[NonNegative] = 1.0,
    gamma: Code[float] = 1.0,
    lam: Paper[float] = 0.95,
    whiten: Code[bool] = True,
    normalise_returns: Ours[bool] = False,
    kl_coefficient: Code[NonNegative] = 0.05,
    kl_in: Code[Literal["reward", "loss"]] = "reward",
    kl_estimator: Ours[Estimator | None] = None,
    kl_target: Ours[Positive | None] = None,
    kl_horizon: Code[Positive] = 10000.0,
    entropy_coefficient: Code[NonNegative] = 0.0,
) -> Algorithm:
    """Proximal Policy Optimization (PPO).

    A clipped surrogate with a learnt critic V. With r_t the rewards of the actions (the score is added to the last),

        delta_t = r_t + gamma V_{t+1} - V_t,    A_t = delta_t + gamma lam A_{t+1},    R_t = A_t + V_t
        loss = -mean_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
               + value_coefficient/2 mean_t max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2)

    with means over the tokens of the batch, V_old the critic before the update, and V = 0 after the last action. whiten
    standardises A over the batch (unbiased variance), after R is computed. dual_clip c > 1 bounds the loss of a bad
    action by -c A (1912.09729; verl: 3). entropy_coefficient: entropy bonus. normalise_returns: the critic predicts
    (R - mean) / std with the moments of all earlier batches, for rewards of any scale.

    The paper has neither a value clip nor a reference policy, and its value loss has no factor 1/2. kl_coefficient beta
    (0: none) adds -beta k to each action's reward (kl_in "reward", with k of the sampling policy and kl_estimator "k1"
    unless given), or beta mean_t k to the loss (kl_in "loss", with k of the current policy and "k2", whose gradient is
    that of the divergence). With a kl_target beta is adaptive (1909.08593):
    beta <- beta (1 + clip(KL / kl_target - 1, -0.2, 0.2) n / kl_horizon) for batches of n rows.

    Other settings. Paper, for control: gamma 0.99. verl: lam 1, value_clip 0.5, kl_coefficient 0.001, dual_clip 3. TRL:
    value_coefficient 0.1. Under Adam a critic with weights of its own is insensitive to value_coefficient.
    """
    beta = kl_coefficient if kl_target is None else "kl_coefficient"
    rewarded = kl_in == "reward" and not is_off(beta)
    credit = generalised_advantages(gamma, lam)
    transform = chain_present(
        None if kl_target is None else adaptive_kl(kl_coefficient, kl_target, kl_horizon),
        kl_reward(beta, kl_estimator or "k1") if rewarded else None,
        normalised_values(credit) if normalise_returns else credit,
        whiten_advantages() if whiten else None,
    )
    objective = clipped_policy(clip_low, clip_high, dual=dual_clip) + value_coefficient * value_loss(value_clip)
    objective += (beta if kl_in == "loss" else 0.0) * kl(estimator=kl_estimator or "k2")
    return Algorithm(transform, objective - entropy_coefficient * entropy())
