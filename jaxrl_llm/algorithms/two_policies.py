"""Methods in which the policy works with another one: a guide that writes parts of its response, or a solver."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import jax.numpy as jnp

from jaxrl_llm.advantages.guide_masks import split_at_switch
from jaxrl_llm.advantages.kl_rewards import kl_reward
from jaxrl_llm.advantages.returns import generalised_advantages, whiten_advantages
from jaxrl_llm.algorithms.actor_critic import ppo
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.core.transform import chain
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.values import value_loss
from jaxrl_llm.rewards.transforms import rescore
from jaxrl_llm.rollouts.decomposed import decomposing
from jaxrl_llm.rollouts.guidance.two_policies import two_policies
from jaxrl_llm.utils.errors import is_off

__all__ = ["daslam", "rlgf"]


def rlgf(
    begins: Literal["guide", "learner", "learner_first"] = "guide",
    column: str = "guide",
    guide: str | None = None,
    share: float = 0.8,
    learner_steps: int = 20,
    kl_coefficient: float = 0.05,
    gamma: float = 1.0,
    lam: float = 0.95,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    value_clip: float | None = 0.2,
    value_coefficient: float = 1.0,
) -> Algorithm:
    """RL with guided feedback (RLGF, Learning to Generate Better Than Your LLM, arXiv 2306.11816, 2023).

    A response of n tokens is drawn from one policy; with probability `share` its first h tokens are kept, h uniform
    from 1 to n - 1, else h = 0; and the other policy writes the rest. One of the two is a guide, of which only samples
    are needed. begins says who writes the first h tokens:

        guide            PPO++: the guide brings the learner to good states. Losses of policy and critic on the
                         learner's tokens t >= h
        learner          AggreVaTeD: the policy loss is on the learner's tokens t < h, the value loss on the guide's,
                         t >= h, so that the critic estimates the guide's value, which the learner improves on
        learner_first    D2LOLS: AggreVaTeD for learner_steps iterations, then PPO++

    The score of the whole response is the reward of the last token, and each action's reward gets
    -kl_coefficient (logp_old - logp_ref); A is from GAE (gamma, lam) over the row's actions, R = A + V, and A then
    whitened. With means over the tokens that a loss sees,

        loss = -mean min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
               + value_coefficient/2 mean max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2)

    Where the guide begins, its samples come from the row's `column`, a text or a list of texts: a guide does not learn,
    so it may answer before the run. Where it completes, `guide` is FILE.py:FUNCTION of the problem and the response so
    far, which returns the rest. LOLS, which alternates at random between both with a critic for each, is not included.
    The guide's sampling (the paper: top-p 0.92, top-k 50) is its own.

    Defaults. Paper: share, clip_low, clip_high. Code: begins, learner_steps, gamma, lam. Ours: column, guide,
    kl_coefficient, value_clip, value_coefficient.
    """
    transform = chain(
        *([] if is_off(kl_coefficient) else [kl_reward(kl_coefficient, of="old")]),
        generalised_advantages(gamma, lam),
        whiten_advantages(),
        split_at_switch(),
    )
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean())
    objective += value_coefficient * value_loss(value_clip)
    return Algorithm(transform, objective, rollout=two_policies(begins, column, guide, share, learner_steps))


@part
def shaped_by_decomposition(shaping: float) -> Callable[[Trajectories], Array]:
    """A function `batch -> f32[N]`: the scores, plus `shaping` times the sum of info["decomposition"] f32[N, 4]."""

    def score(batch: Trajectories) -> Array:
        terms = (batch.info or {}).get("decomposition")
        return batch.scores if terms is None else batch.scores + shaping * jnp.sum(jnp.nan_to_num(terms), axis=1)

    return score


def daslam(
    solver: str | None = None,
    column: str = "solution",
    questions: int = 8,
    solver_tokens: int | None = None,
    nouns: str | None = None,
    embed: str | None = None,
    shaping: float = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    value_clip: float | None = 0.2,
    value_coefficient: float = 0.1,
    gamma: float = 1.0,
    lam: float = 0.95,
    kl_coefficient: float = 0.01,
    kl_target: float | None = 0.1,
    kl_horizon: float = 10000.0,
) -> Algorithm:
    """Decomposition and solution by language models (DaSLaM, arXiv 2310.18338, 2023).

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

    Defaults. Code: column, shaping, kl_coefficient, kl_horizon, clip_low, clip_high, value_clip, value_coefficient,
    gamma, lam. Ours: questions, solver_tokens, nouns, embed, kl_target. Run: solver.
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
