import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.turns import compared, of_episode, turn_advantages, turn_mask, turn_rewards, where_given
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import Code, Divisor, MomentsOver, NonNegative, NonNegativeInt
from jaxrl_llm.core.parts import Array, Trajectories, batch_part
from jaxrl_llm.objectives import clipped_policy
from jaxrl_llm.selection.rows import row_noise


@method(paper="arXiv 2512.02631", test="test_turn_credit.py::test_srgpo_worked_example")
@run_needs(turn_rewards="the progress of each turn", turns="episodes of several turns")
def srgpo(
    size: Code[int] = 16,
    step_weight: Code[float] = 0.5,
    scale: Code[Divisor] = "std",
    over: Code[MomentsOver] = "turns",
    epsilon: Code[NonNegative] = 1e-6,
    clip_low: Code[NonNegative] = 0.2,
    clip_high: Code[NonNegative] = 0.2,
    kl_coefficient: Code[NonNegative] = 0.01,
) -> Algorithm:
    """Step Reward Group Policy Optimization (SRGPO of SeeNav-Agent).

    Where the reward s_t of a turn does not depend on how hard its state is, such as 1 for progress and 0 without, turns
    of any states can be compared: in random groups c of `size` turns of the batch (0: all of them). With E the score of
    the episode

        A_t = (E - mean_g E) / (std_g E + epsilon) + step_weight (s_t - mean_c s) / (std_c s + epsilon)

    on all tokens of the turn, then PPO's clip (clip_low, clip_high) and kl_coefficient k3, averaged over tokens. over:
    whether moments of E count each turn or each episode once. scale "none" leaves out both deviations (n - 1). The
    groups follow from the tokens and their log-probabilities, and change with each batch. Penalties for invalid actions
    are the environment's to give. The code can also draw groups within prompts or episodes.
    """
    step = where_given("turn_rewards", compared(turn_rewards(), random_groups(size), scale, epsilon=epsilon))
    episode = of_episode(scale, over, epsilon, "score")
    return Algorithm(
        turn_advantages(episode, step, weights=(1.0, step_weight), needs={"turn_rewards"}),
        clipped_policy(clip_low, clip_high, kl_coefficient=kl_coefficient),
    )


@batch_part
def random_groups(batch: Trajectories, size: NonNegativeInt = 16) -> Array:
    """Keys: random groups of `size` turns of the batch, the last one smaller; size 0: one group of all.

    The permutation follows from the rows' tokens and turns, so that it is the same whatever the order of the rows.
    """
    mask = turn_mask(batch)
    if size == 0:
        return jnp.zeros(mask.shape, jnp.int32)
    noise = jax.vmap(lambda turn: row_noise(batch, turn), out_axes=1)(jnp.arange(mask.shape[1]))
    place = jnp.argsort(jnp.argsort(jnp.where(mask, noise, 1.0).reshape(-1), stable=True), stable=True)
    return (place // size).astype(jnp.int32).reshape(mask.shape)
