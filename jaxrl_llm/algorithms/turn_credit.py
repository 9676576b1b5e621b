"""Methods that compare the turns of a group's episodes with each other: at the same state, transition, or index."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages.group import drop_rows
from jaxrl_llm.advantages.turns.turn_rewards import where_given
from jaxrl_llm.advantages.turns.turns import (
    compared,
    mean_over_equal,
    nested_states,
    of_episode,
    random_groups,
    same_state,
    same_turn,
    turn_advantages,
    turn_returns,
    turn_rewards,
)
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.core.transform import Objective, chain
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.off_policy import importance_correction, mismatch
from jaxrl_llm.objectives.policy_gradient import regularised
from jaxrl_llm.rollouts.agents.state_clusters import similar_states

__all__ = ["gigpo", "hgpo", "salt", "srgpo", "trloo"]


def clipped(low: float, high: float, kl_coefficient: float) -> Objective:
    """PPO's clip averaged over the tokens of the batch, plus kl_coefficient times k3 to the reference."""
    objective = policy_gradient(token_ratio(), clip(low, high), token_mean())
    return regularised(objective, token_mean(), kl_coefficient=kl_coefficient)


def gigpo(
    step_weight: float = 1.0,
    gamma: float = 0.95,
    scale: Literal["none", "std"] = "none",
    over: Literal["rows", "turns"] = "rows",
    similarity: float | None = None,
    epsilon: float = 1e-6,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.01,
) -> Algorithm:
    """Group-in-Group Policy Optimization (GiGPO, arXiv 2505.10978, 2025).

    Turns of a group that begin in the same state are compared by what followed, beside the episodes (eqs. 3 to 8). With
    G_t = sum_{u >= t} gamma^(u - t) r_u the return from turn t on and R the return of the episode, undiscounted

        A_t = (R - mean_g R) + step_weight (G_t - mean_s G),    s: the turns of the group in the same state

    on all tokens of the turn, then PPO's clip (clip_low, clip_high) and kl_coefficient k3, averaged over tokens. scale
    "std" divides either term by its standard deviation (n - 1) + epsilon. A turn that is alone in its state has the
    episode's term only. over: whether an episode counts once in mean_g, or once a turn, as in the released code unless
    told otherwise. An episode without others in its group gets 0; the code gives it R.

    What states are equal is up to the environment's name of them. similarity: joins states whose texts are similar
    (`rollouts.agents.state_clusters`; the code's value is 0.95, and its default is not to). The code subtracts 0.1 for
    invalid actions, which here is the environment's to do. Without turn rewards the score comes with the last turn.

    Defaults. Paper: step_weight. Code: scale, similarity, epsilon, clip_low, clip_high. Recalled: gamma,
    kl_coefficient. Ours: over.
    """
    step = where_given("state_key", compared(turn_returns(gamma), same_state(), scale, epsilon=epsilon))
    episode = of_episode(scale, over, epsilon)
    return Algorithm(
        turn_advantages(episode, step, weights=(1.0, step_weight), needs={"state_key"}),
        clipped(clip_low, clip_high, kl_coefficient),
        rollout=None if similarity is None else similar_states(similarity),
    )


def hgpo(
    depth: int = 2,
    alpha: float = 1.0,
    with_episode: bool = False,
    gamma: float = 0.95,
    scale: Literal["none", "std"] = "none",
    epsilon: float = 1e-6,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.01,
) -> Algorithm:
    """Hierarchy-of-Groups Policy Optimization (HGPO, arXiv 2602.22817, 2026).

    A turn is compared with those of its group that share its state and the states before it, at each length of this
    history. With G_t the return from turn t on, discounted by gamma, and h_k the turns with the same last k states

        A_t = sum_k w_k (G_t - mean_{h_k} G),    w_k = (k + 1)^alpha / (sum of these + epsilon),    k = 1 ... depth + 1

    over the k whose h_k has another turn and whose difference is not 0; 0 where there is none. with_episode: k = 0 is
    the episode's return less the mean of its group's. scale "std" divides each difference by its standard deviation (n,
    for k = 0 n - 1) + epsilon. The loss is PPO's clip (clip_low, clip_high) and kl_coefficient k3, averaged over
    tokens. The weights are the released code's; its scripts also have depth 4.

    Defaults. Code: depth, alpha, with_episode, scale, epsilon. Ours: gamma, clip_low, clip_high, kl_coefficient.
    """
    episode = of_episode(scale, epsilon=epsilon) if with_episode else None
    nested = nested_states(turn_returns(gamma), depth, alpha, scale, epsilon, episode)
    return Algorithm(
        turn_advantages(where_given("state_key", nested, of_episode(scale, epsilon=epsilon)), needs={"state_key"}),
        clipped(clip_low, clip_high, kl_coefficient),
    )


def salt(
    history: int = 0,
    scale: Literal["none", "std"] = "std",
    epsilon: float = 1e-6,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
) -> Algorithm:
    """Step-level Advantage assignment via Trajectory graph (SALT, arXiv 2510.20022, 2025).

    A turn that several episodes of a group have in common says little about which of them was better. With A the
    advantages of the episodes, as in GRPO (scale, epsilon), a turn gets the mean

        A_t = mean of A over the turns of the group with the same transition,

    which are equal in their state, the `history` states before that, the tokens of the turn, and the state after it.
    A turn of one episode alone keeps its A, one of all episodes has 0. An episode that repeats a transition counts each
    time. Then PPO's clip (clip_low, clip_high) and kl_coefficient k3, averaged over tokens. The rule is that of
    summaries of the paper; tokens, not texts, are compared.

    Defaults. Ours: history, scale, epsilon, clip_low, clip_high, kl_coefficient.
    """
    episode = of_episode(scale, epsilon=epsilon)
    credit = where_given("state_key", mean_over_equal(episode, history), episode)
    return Algorithm(
        turn_advantages(credit, needs={"state_key"}),
        clipped(clip_low, clip_high, kl_coefficient),
    )


def srgpo(
    size: int = 16,
    step_weight: float = 0.5,
    scale: Literal["none", "std"] = "std",
    over: Literal["rows", "turns"] = "turns",
    epsilon: float = 1e-6,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.01,
) -> Algorithm:
    """Step Reward Group Policy Optimization (SRGPO of SeeNav-Agent, arXiv 2512.02631, 2025).

    Where the reward s_t of a turn does not depend on how hard its state is, such as 1 for progress and 0 without, turns
    of any states can be compared: in random groups c of `size` turns of the batch (0: all of them). With E the score of
    the episode

        A_t = (E - mean_g E) / (std_g E + epsilon) + step_weight (s_t - mean_c s) / (std_c s + epsilon)

    on all tokens of the turn, then PPO's clip (clip_low, clip_high) and kl_coefficient k3, averaged over tokens. over:
    whether moments of E count each turn or each episode once. scale "none" leaves out both deviations (n - 1). The
    groups follow from the tokens and their log-probabilities, and change with each batch. Penalties for invalid actions
    are the environment's to give. The code can also draw groups within prompts or episodes.

    Defaults. Code: size, step_weight, scale, over, epsilon, clip_low, clip_high, kl_coefficient.
    """
    step = where_given("turn_rewards", compared(turn_rewards(), random_groups(size), scale, epsilon=epsilon))
    episode = of_episode(scale, over, epsilon, "score")
    return Algorithm(
        turn_advantages(episode, step, weights=(1.0, step_weight), needs={"turn_rewards"}),
        clipped(clip_low, clip_high, kl_coefficient),
    )


@part
def has_unlikely_token(least: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> bool[N]`: rows with a token whose ratio pi_old / pi_behaviour is below `least`."""
    return lambda batch: jnp.min(mismatch(batch), axis=1) < jnp.log(least)


def trloo(
    gamma: float = 1.0,
    tolerance: float | None = None,
    unlikely: float = 1e-4,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Algorithm:
    """Turn-level REINFORCE leave-one-out (TRLOO of Dr. Kernel, arXiv 2602.05885, 2026).

    Each turn has a reward of its own, and its return is compared with the others' at the same turn of the group:

        A_t = G_t - mean_{j != i} G_{j,t},    G_t = sum_{u >= t} gamma^(u - t) r_u

    over the episodes that have a turn t, which is unbiased however many these are; the only one gets G_t, as in the
    released code. The advantage is on all tokens of the turn, in PPO's clip (clip_low, clip_high) averaged over tokens,
    without a penalty.

    With a tolerance (paper: 0.001) episodes are left out of the loss, but not of the means, where the geometric mean of
    the ratios of trainer to sampler is not within 1 +- tolerance, or where a token's is below `unlikely`. It is off by
    default, since samplers that agree with the trainer need none. The rewards of kernels, and the rejection of right
    ones that the profiler finds idle, belong to their environment.

    Defaults. Paper: gamma, unlikely, clip_low, clip_high. Ours: tolerance.
    """
    means = compared(turn_returns(gamma), same_turn(), baseline="leave_one_out", alone="value")
    credit = turn_advantages(means, needs={"turn_rewards"})
    if tolerance is not None:
        near = importance_correction("geometric", "reject", 1 - tolerance, 1 + tolerance, leave_count=True)
        credit = chain(credit, drop_rows(has_unlikely_token(unlikely)), near)
    return Algorithm(credit, policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean()))
