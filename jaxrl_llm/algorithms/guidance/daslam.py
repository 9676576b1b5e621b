"""Decomposition and solution by language models (DaSLaM)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated

import jax.numpy as jnp

from jaxrl_llm.algorithms.classic.ppo import ppo
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import CODE, OURS, RUN, NonNegative, Positive
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.core.transform import chain
from jaxrl_llm.rewards.transforms import rescore
from jaxrl_llm.rollouts.decomposed import decomposing


@part
def shaped_by_decomposition(shaping: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: the scores, plus `shaping` times the sum of info["decomposition"] f32[N, 4]."""

    def score(batch: Trajectories) -> Array:
        terms = (batch.info or {}).get("decomposition")
        return batch.scores if terms is None else batch.scores + shaping * jnp.sum(jnp.nan_to_num(terms), axis=1)

    return score


@method(
    paper="arXiv 2310.18338",
    year=2023,
    test="test_daslam.py::test_daslam_is_ppo_of_its_reward",
    beside={"supervised": ("the supervised start of both models", "supervised training before the run")},
)
def daslam(
    solver: Annotated[str | None, RUN] = None,
    column: Annotated[str, CODE] = "solution",
    questions: Annotated[int, OURS] = 8,
    solver_tokens: Annotated[int | None, OURS] = None,
    nouns: Annotated[str | None, OURS] = None,
    embed: Annotated[str | None, OURS] = None,
    shaping: Annotated[float, CODE] = 1.0,
    clip_low: Annotated[NonNegative, CODE] = 0.2,
    clip_high: Annotated[NonNegative, CODE] = 0.2,
    value_clip: Annotated[float | None, CODE] = 0.2,
    value_coefficient: Annotated[NonNegative, CODE] = 0.1,
    gamma: Annotated[float, CODE] = 1.0,
    lam: Annotated[float, CODE] = 0.95,
    kl_coefficient: Annotated[NonNegative, CODE] = 0.01,
    kl_target: Annotated[float | None, OURS] = 0.1,
    kl_horizon: Annotated[Positive, CODE] = 10000.0,
) -> Algorithm:
    """Decomposition and solution by language models (DaSLaM).

    The policy learns to ask. A solver, which does not learn, answers the problem; the policy sees the problem and that
    attempt, and writes sub-questions; the solver answers them, and then the problem again with these answers. An
    episode's reward, with q_i, a_i a sub-question and its answer, and c1, c2 the similarities of the i-th steps of the
    solver's first and last answer to that of the solution in `column`, is

        R = 1 - |nouns(problem) xor nouns(q)| / |nouns(problem)|  +  0.25 sum_i cos(q_i, a_i)  +  r
            + sum_i (0.5 c1 if c2 > c1, else -1 - 0.5 c1)  +  sum_j (0.5 if operator j is the solution's, else -0.5)

    where r is the run's reward of the last answer; shaping multiplies the four others, and 0 leaves r alone. Then `ppo`
    on the policy's tokens, with a penalty to the reference whose coefficient begins at kl_coefficient and is adapted to
    kl_target, nats per token (the code's 4 are of a whole sequence; None: not adapted), with kl_horizon.

    solver: FILE.py:FUNCTION of a prompt that returns an answer, such as a larger model's; None: the run's reference,
    the initial policy, whose answers have at most solver_tokens. questions: most of them. nouns, embed: see
    `rollouts.decomposed.decomposing`; by default words with a meaning of their own, and counts of words, where the code
    has a tagger and vectors of words. clip_low, clip_high, value_clip, value_coefficient, gamma and lam as in `ppo`.
    The words of the prompts are ours. The paper first trains the policy on known sub-questions.
    """
    base = ppo(
        clip_low=clip_low, clip_high=clip_high, value_clip=value_clip, value_coefficient=value_coefficient, gamma=gamma,
        lam=lam, kl_coefficient=kl_coefficient, kl_target=kl_target, kl_horizon=kl_horizon,
    )  # fmt: skip
    shaped = rescore(shaped_by_decomposition(shaping), {"decomposition"})
    return replace(
        base,
        transform=chain(shaped, base.transform),
        rollout=decomposing(solver, column, questions, solver_tokens, nouns, embed),
    )
