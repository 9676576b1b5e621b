"""Polychromic Objectives for Reinforcement Learning (Poly-PPO)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Literal

import jax

from jaxrl_llm.advantages.group import on_actions
from jaxrl_llm.advantages.sets import DIVERSITIES, diverse_sets_advantage
from jaxrl_llm.advantages.votes import answer_keys
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import CODE, OURS, PAPER
from jaxrl_llm.core.ranges import Count, NonNegative
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.objectives import clip, kl, policy_gradient, token_mean, token_ratio
from jaxrl_llm.utils.errors import require_choice


@part
def diverse_sets_credit(
    set_size: int, diversity: Literal["share", "share_or_zero", "zero_based"]
) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N]`: the advantages of `polychromic`."""

    def advantage(batch: Trajectories) -> jax.Array:
        return diverse_sets_advantage(batch.scores, answer_keys(batch), batch.group, set_size, diversity)

    return advantage


@method(
    paper="arXiv 2509.25424",
    year=2025,
    test="test_sets.py::test_polychromic_is_the_loop_over_all_sets",
    needs={"answer_key": "diversity of answers; without it whole completions are compared"},
    beside={"vine": ("sets of rollouts from states that an episode visited (Poly-PPO)", "forks of episodes")},
)
def polychromic(
    set_size: Annotated[Count, PAPER] = 4,
    diversity: Annotated[Literal["share", "share_or_zero", "zero_based"], PAPER] = "share",
    kl_coefficient: Annotated[NonNegative, CODE] = 0.005,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
) -> Algorithm:
    """Polychromic Objectives for Reinforcement Learning (Poly-PPO).

    The reward is that of a set of n samples of the prompt, its mean reward times its diversity, shared by its members:

        f(S) = mean_S r * d(S),    A_i = mean of f over the sets with i - mean of f over all sets

    over all sets of n = set_size responses of the group, in closed form (the paper samples sets). diversity: "share", d
    is the number of distinct answers / n; "share_or_zero", the same but 0 where all members agree, as in replications;
    "zero_based", (distinct - 1) / (n - 1). Answers are compared by info["answer_key"] int32[N], or, without it, by
    their tokens. With rho the token's ratio and l = log rho, the loss is

        mean over tokens of -min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coefficient (rho - 1 - l)

    whose last term estimates the paper's KL(behaviour || pi) without bias. The paper's coefficient and average are not
    known to us; replications use 0.005 to 0.1. Rewards such as number_match give the answers. With a single turn the
    prompt is the only state, so the group plays the role of the paper's vine rollouts (8 from each visited state).
    """
    require_choice("diversity", diversity, DIVERSITIES)
    average = token_mean()
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), average)
    objective += kl_coefficient * kl(to="behaviour", estimator="k3", average=average, reverse=True)

    return Algorithm(on_actions(diverse_sets_credit(set_size, diversity), {"answer_key"}), objective)
