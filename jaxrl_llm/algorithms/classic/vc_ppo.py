from jaxrl_llm.advantages import generalised_advantages, whiten_advantages
from jaxrl_llm.algorithms.classic.ppo import chain_present
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import NonNegative, Ours, Paper, Positive
from jaxrl_llm.objectives import clipped_policy, value_loss


@method(paper="arXiv 2503.01491", test="test_actor_critic.py::test_vc_ppo_and_vapo_are_their_loops")
def vc_ppo(
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.2,
    value_clip: Ours[Positive | None] = 0.2,
    value_coefficient: Ours[NonNegative] = 1.0,
    gamma: Paper[float] = 1.0,
    lam: Paper[float] = 0.95,
    lam_critic: Paper[float] = 1.0,
    whiten: Ours[bool] = True,
) -> Algorithm:
    """Value-Calibrated PPO (VC-PPO, What's Behind PPO's Collapse in Long-CoT?).

    Decoupled GAE: advantages as in `ppo` with lam < 1, but the critic's targets are R_t = A_t(lam_critic) + V_t. With
    lam_critic 1 these are Monte Carlo returns, in which the reward does not decay towards the first tokens. clip_low,
    clip_high, value_clip, value_coefficient, gamma and whiten as in `ppo`; no reference policy.

    The paper first trains the critic alone, on the Monte Carlo returns of the frozen policy, for 100 steps: set the
    run's `critic_steps`.
    """
    advantages = generalised_advantages(gamma, lam, lam_critic)
    transform = chain_present(advantages, whiten_advantages() if whiten else None)
    return Algorithm(transform, clipped_policy(clip_low, clip_high) + value_coefficient * value_loss(value_clip))
