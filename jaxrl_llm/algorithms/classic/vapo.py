from jaxrl_llm.advantages import generalised_advantages, length_adaptive, whiten_advantages
from jaxrl_llm.algorithms.classic.ppo import chain_present
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import NonNegative, Ours, Paper, Positive
from jaxrl_llm.objectives import clipped_policy, count_tokens, imitation, mean_by, right_answers, value_loss


@method(paper="arXiv 2504.05118", test="test_actor_critic.py::test_vc_ppo_and_vapo_are_their_loops")
def vapo(
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.28,
    alpha: Paper[NonNegative] = 0.05,
    value_clip: Ours[Positive | None] = 0.2,
    value_coefficient: Ours[NonNegative] = 1.0,
    gamma: Paper[float] = 1.0,
    lam_critic: Paper[float] = 1.0,
    whiten: Ours[bool] = True,
    imitation_coefficient: Paper[NonNegative] = 0.1,
    success: Ours[float] = 0.5,
) -> Algorithm:
    """Value-based Augmented PPO (VAPO).

    `vc_ppo` with lam = 1 - 1 / (alpha l) for an answer of l tokens, clipped to [0, 1], so that the sum of the GAE
    coefficients, alpha l, grows with l; a higher clip_high; and, for the answers with a score above success,

        loss += imitation_coefficient * -(sum over their tokens of logp) / (number of their tokens)

    With alpha 0.05 answers of up to 20 tokens have lam 0. clip_low, value_clip (None: off), value_coefficient, gamma,
    lam_critic and whiten as in `vc_ppo`. The paper samples 16 answers for each of 512 prompts rather than fewer for
    more prompts, and trains the critic alone for 50 steps first (the run's `critic_steps`).
    """
    advantages = generalised_advantages(gamma, length_adaptive(alpha), lam_critic)
    right = right_answers(success)
    transform = chain_present(advantages, whiten_advantages() if whiten else None, count_tokens(right, "right_tokens"))
    policy = clipped_policy(clip_low, clip_high) + imitation_coefficient * imitation(right, mean_by("right_tokens"))
    return Algorithm(transform, policy + value_coefficient * value_loss(value_clip))
