from jaxrl_llm.advantages import discounted_returns, whiten_advantages
from jaxrl_llm.algorithms.classic.rloo import with_kl_reward
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import Code, NonNegative, Paper
from jaxrl_llm.objectives import clipped_policy


@method(paper="arXiv 2501.03262", test="test_critic_free.py::test_reinforce_plus_plus_is_the_loop")
def reinforce_plus_plus(
    kl_coefficient: Code[NonNegative] = 0.001,
    gamma: Paper[float] = 1.0,
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.2,
) -> Algorithm:
    """REINFORCE++ (Critic-Free Policy Optimization with Global Advantage Normalization).

    PPO without a critic; advantages are standardised over the batch rather than the prompt's group, so that one
    response per prompt is enough.

        r_t = r 1[t last] - kl_coefficient (logp_behaviour - logp_ref)_t,    G_t = r_t + gamma G_{t+1}
        A_t = (G_t - mean) / sqrt(var + 1e-8)  over all tokens of the batch

    in PPO's clipped loss (clip_low, clip_high), mean over tokens. gamma: discount per token of the policy; returns pass
    through tokens of the environment unchanged.
    """
    transform = with_kl_reward(kl_coefficient, discounted_returns(gamma), whiten_advantages(over="tokens"))
    return Algorithm(transform, clipped_policy(clip_low, clip_high))
