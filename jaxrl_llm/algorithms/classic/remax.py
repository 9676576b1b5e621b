import jax.numpy as jnp

from jaxrl_llm.algorithms.classic.reinforce import averaged_gradient
from jaxrl_llm.algorithms.classic.rloo import with_kl_reward
from jaxrl_llm.algorithms.method import Algorithm, method, presets
from jaxrl_llm.core.annotations import AverageName, Code, Fraction, NonNegative, Paper, Positive
from jaxrl_llm.core.parts import Trajectories, batch_part, stateless
from jaxrl_llm.objectives import log_probability


@batch_part
def above_greedy(batch: Trajectories, gamma: float, reward_clip: float | None) -> Trajectories:
    """A function of the batch that writes the advantages of `remax`."""
    r = jnp.nan_to_num(batch.scores - batch.need("greedy_reward"))
    r = r if reward_clip is None else jnp.clip(r, -reward_clip, reward_clip)
    left = jnp.maximum(batch.lengths[:, None] - 1 - batch.action_index, 0.0)
    own = 0.0 if batch.token_rewards is None else batch.token_rewards
    scored = batch.action_mask & ~jnp.isnan(batch.scores)[:, None]
    return batch.replace(advantages=jnp.where(scored, jnp.power(gamma, left) * r[:, None] + own, 0.0))


@method(paper="arXiv 2310.10505", test="test_score_function.py::test_remax_is_the_loop")
@presets(
    paper={"gamma": 1.0, "reward_clip": None, "average": "sum"},
    code={"gamma": 0.99, "reward_clip": 5.0, "average": "token"},
)
def remax(
    gamma: Paper[Fraction] = 1.0,
    kl_coefficient: Code[NonNegative] = 0.05,
    reward_clip: Paper[Positive | None] = None,
    average: Paper[AverageName] = "sum",
) -> Algorithm:
    """ReMax (A Simple, Effective, and Efficient RL Method for Aligning LLMs).

    The baseline is the reward of the same policy's greedy response to the prompt: no critic, no group.

        A_t = gamma^(T - t) clip(r - r_greedy, -c, c) - kl_coefficient (logp_behaviour - logp_ref)_t,    t = 1..T
        loss = -1/N sum_i sum_t A_t log pi(a_t)

    c = reward_clip; None: no bound. As in the released code, each token has its own KL term, not the sum over later
    tokens. That code (preset "code") also has gamma 0.99, c = 5, and a token mean where the paper sums (average);
    its power of gamma is one higher (gamma^1 on the last token), which is not done here.
    Rollout: one greedy completion per prompt, with the sampling weights.
    """

    transform = with_kl_reward(kl_coefficient, stateless(above_greedy(gamma, reward_clip), needs={"greedy_reward"}))
    return Algorithm(transform, averaged_gradient(log_probability(), average))
