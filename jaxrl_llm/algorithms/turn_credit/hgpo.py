import jax.numpy as jnp

from jaxrl_llm.advantages import of_episode, same_state, turn_advantages, turn_returns, where_given
from jaxrl_llm.advantages.turns import OfTurns, above_buckets, turn_mask
from jaxrl_llm.algorithms.method import Algorithm, method, run_needs
from jaxrl_llm.core.annotations import Code, Divisor, NonNegative, NonNegativeInt, Ours
from jaxrl_llm.core.parts import Array, Trajectories, batch_part
from jaxrl_llm.objectives import clipped_policy


@method(paper="arXiv 2602.22817", test="test_turn_credit.py::test_hgpo_worked_example")
@run_needs(state_key="turns that begin in the same states", turns="episodes of several turns")
def hgpo(
    depth: Code[int] = 2,
    alpha: Code[NonNegative] = 1.0,
    with_episode: Code[bool] = False,
    gamma: Ours[float] = 0.95,
    scale: Code[Divisor] = "none",
    epsilon: Code[NonNegative] = 1e-6,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.01,
) -> Algorithm:
    """Hierarchy-of-Groups Policy Optimization (HGPO).

    A turn is compared with those of its group that share its state and the states before it, at each length of this
    history. With G_t the return from turn t on, discounted by gamma, and h_k the turns with the same last k states

        A_t = sum_k w_k (G_t - mean_{h_k} G),    w_k = (k + 1)^alpha / (sum of these + epsilon),    k = 1 ... depth + 1

    over the k whose h_k has another turn and whose difference is not 0; 0 where there is none. with_episode: k = 0 is
    the episode's return less the mean of its group's. scale "std" divides each difference by its standard deviation (n,
    for k = 0 n - 1) + epsilon. The loss is PPO's clip (clip_low, clip_high) and kl_coefficient k3, averaged over
    tokens. The weights are the released code's; its scripts also have depth 4.
    """
    episode = of_episode(scale, epsilon=epsilon) if with_episode else None
    nested = nested_states(turn_returns(gamma), depth, alpha, scale, epsilon, episode)
    return Algorithm(
        turn_advantages(where_given("state_key", nested, of_episode(scale, epsilon=epsilon)), needs={"state_key"}),
        clipped_policy(clip_low, clip_high, kl_coefficient=kl_coefficient),
    )


@batch_part
def nested_states(
    batch: Trajectories,
    values: OfTurns,
    depth: NonNegativeInt = 2,
    alpha: float = 1.0,
    scale: Divisor = "none",
    epsilon: float = 1e-6,
    outermost: OfTurns | None = None,
) -> Array:
    """Advantages of turns against those with the same last k states, averaged over k = 1 ... depth + 1 (HGPO).

    Weights are (k + 1)^alpha over the k whose bucket has another turn and an advantage other than 0, as in the released
    code; 0 where there is none. outermost: advantages for k = 0. scale "std": the population's standard deviation.
    """
    mask, total, mass = turn_mask(batch), jnp.zeros(()), jnp.zeros(())
    returns = values(batch)
    if outermost is not None:
        total = outermost(batch)
        mass = jnp.where(total != 0, 1.0, 0.0)
    for k in range(1, depth + 2):
        # The first k turns have fewer states before them than k.
        enough = mask & (jnp.arange(mask.shape[1]) >= k - 1)
        one = above_buckets(returns, same_state(k)(batch), enough, scale, ddof=0, epsilon=epsilon)
        weight = jnp.where(one != 0, (k + 1.0) ** alpha, 0.0)
        total, mass = total + weight * one, mass + weight
    return jnp.where(mask, total / (mass + epsilon), 0.0)
