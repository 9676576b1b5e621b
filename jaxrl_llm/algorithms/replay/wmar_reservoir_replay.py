"""WMAR's replay (Augmenting Replay in World Models for Continual Reinforcement Learning)."""

from __future__ import annotations

from typing import Annotated

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.advantages.replayed import keep_stored_advantages
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import OURS, Fraction, NonNegative, NonNegativeInt, ZeroOrOne
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.replay.base import recent_and_reservoir


@method(
    paper="arXiv 2401.16650",
    year=2024,
    test="test_replayed.py::test_wmar_is_the_loop_over_replayed_rows",
    beside={"world_model": ("the world model that learns from the replay", "a model of the world")},
)
def wmar_reservoir_replay(
    recent: Annotated[NonNegativeInt, OURS] = 512,
    reservoir: Annotated[NonNegativeInt, OURS] = 512,
    replay_share: Annotated[Fraction, OURS] = 1.0,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    ddof: Annotated[ZeroOrOne, OURS] = 1,
    epsilon: Annotated[NonNegative, OURS] = 1e-6,
) -> Algorithm:
    """WMAR's replay (Augmenting Replay in World Models for Continual Reinforcement Learning).

    Two stores: the newest `recent` completions, and a uniform sample of `reservoir` of all so far. Each completion gets
    a key u ~ U(0, 1), and the largest keys stay, so that after n completions each is kept with probability reservoir/n
    and the early prompts of a curriculum stay represented. round(replay_share N) completions join the N of a step, half
    from each store, uniformly.

    The paper learns a world model. Here a completion keeps the advantage that it had in its own group, A =
    (r - mean_g)/(std_g + epsilon) (ddof), those with A = 0 for the whole group are not stored, and the loss is the
    token mean of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) with rho relative to the policy that sampled the
    token.
    """
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean())
    transform = chain(group_relative(ddof=ddof, epsilon=epsilon), keep_stored_advantages())
    return Algorithm(transform, objective, replay=recent_and_reservoir(replay_share, recent, reservoir, ddof, epsilon))
