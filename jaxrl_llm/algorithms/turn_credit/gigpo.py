from jaxrl_llm.advantages.turns import compared, of_episode, same_state, turn_advantages, turn_returns, where_given
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import Code, Divisor, MomentsOver, NonNegative, Ours, Paper, Recalled
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.rollouts.agents.program import similar_states


@method(paper="arXiv 2505.10978", test="test_turn_credit.py::test_gigpo_worked_example")
@run_needs(state_key="turns that begin in the same state", turns="episodes of several turns")
def gigpo(
    step_weight: Paper[float] = 1.0,
    gamma: Recalled[float] = 0.95,
    scale: Code[Divisor] = "none",
    over: Ours[MomentsOver] = "rows",
    similarity: Code[float | None] = None,
    epsilon: Code[NonNegative] = 1e-6,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    kl_coefficient: Recalled[NonNegative] = 0.01,
) -> Algorithm:
    """Group-in-Group Policy Optimization (GiGPO).

    Turns of a group that begin in the same state are compared by what followed, beside the episodes (eqs. 3 to 8). With
    G_t = sum_{u >= t} gamma^(u - t) r_u the return from turn t on and R the return of the episode, undiscounted

        A_t = (R - mean_g R) + step_weight (G_t - mean_s G),    s: the turns of the group in the same state

    on all tokens of the turn, then PPO's clip (clip_low, clip_high) and kl_coefficient k3, averaged over tokens. scale
    "std" divides either term by its standard deviation (n - 1) + epsilon. A turn that is alone in its state has the
    episode's term only. over: whether an episode counts once in mean_g, or once a turn, as in the released code unless
    told otherwise. An episode without others in its group gets 0; the code gives it R.

    What states are equal is up to the environment's name of them. similarity: joins states whose texts are similar
    (`agents.program.similar_states`; the code's value is 0.95, and its default is not to). The code subtracts 0.1 for
    invalid actions, which here is the environment's to do. Without turn rewards the score comes with the last turn.
    """
    step = where_given("state_key", compared(turn_returns(gamma), same_state(), scale, epsilon=epsilon))
    episode = of_episode(scale, over, epsilon)
    return Algorithm(
        turn_advantages(episode, step, weights=(1.0, step_weight), needs={"state_key"}),
        clipped_policy(clip_low, clip_high, kl_coefficient=kl_coefficient),
        rollout=None if similarity is None else similar_states(similarity),
    )
