import jax.numpy as jnp

from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import NonNegative, Ours
from jaxrl_llm.core.parts import Trajectories, chain, stateless_part
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.objectives.preference.pairs import higher_of, win_rates
from jaxrl_llm.rollouts.pairs import higher, with_win_rates


@method(paper="arXiv 2401.04056", test="test_online_preferences.py::test_spo_self_play_worked_example")
@beside("queue", "the queue of past trajectories that control tasks compare with", "a replay")
def spo_self_play(
    clip_low: Ours[NonNegative] = 0.2, clip_high: Ours[NonNegative] = 0.2, kl_coefficient: Ours[NonNegative] = 0.0
) -> Algorithm:
    """Self-Play Preference Optimization (SPO, A Minimaximalist Approach).

    The reward of a sample is how often it beats the other samples of its group, so that a policy plays against itself
    and preferences need not be transitive:

        r_i = 1/(G - 1) sum over j != i of P(y_i > y_j),   A_i = r_i - 1/2

    The group's mean of r is 1/2. P is the verdict of a judge of pairs (--rollout judged_pairs --rewards judge), or 1,
    1/2 and 0 for higher, equal and lower rewards of the run. Any policy gradient follows; here PPO's clip (clip_low,
    clip_high) with token means, and kl_coefficient times k3 to the reference.
    """
    objective = clipped_policy(clip_low, clip_high, kl_coefficient=kl_coefficient)
    return Algorithm(chain(beyond_half()), objective, rollout=with_win_rates(oracle=higher))


@stateless_part({"win_rate"})
def beyond_half(batch: Trajectories) -> Trajectories:
    """Set advantages to `win_rates` - 1/2, of higher and lower rewards unless they are given; 0 where none is known."""
    A = jnp.nan_to_num(win_rates(batch, higher_of) - 0.5)
    return batch.replace(advantages=jnp.where(batch.action_mask, A[:, None], 0.0))
