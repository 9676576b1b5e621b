"""eXplore-eXploit GRPO (XRPO)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.advantages.multipliers import capped_bonus, novelty, revised, row_mean
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.hyperparameters import OURS, PAPER, Count, NonNegative
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import chain
from jaxrl_llm.curriculum.few_shot_memory import solved_examples
from jaxrl_llm.objectives import clip, policy_gradient, sequence_mean, token_ratio
from jaxrl_llm.rollouts.adaptive import by_confidence, in_rounds
from jaxrl_llm.rollouts.guidance.repair import succeeds


@part
def with_novelty_bonus(novelty_coefficient: float, kappa: float) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N, L]`: the advantages with the bonus of `xrpo` where they are above 0."""

    def lifted(batch: Trajectories) -> jax.Array:
        A = batch.need("advantages")
        s = jnp.where(jnp.isnan(batch.scores), jnp.nan, row_mean(batch.need("old_logp"), batch.action_mask))
        bonus = novelty_coefficient * novelty(s, batch.group)[:, None]
        return jnp.where(A > 0, capped_bonus(A, bonus, kappa), A)

    return lifted


@method(paper="arXiv 2510.06672", year=2025, test="test_exploration.py::test_xrpo_against_a_loop")
def xrpo(
    novelty_coefficient: Annotated[NonNegative, PAPER] = 2.5,
    kappa: Annotated[NonNegative, PAPER] = 0.5,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    first: Annotated[int | None, OURS] = None,
    rounds: Annotated[Count, OURS] = 2,
    exploration: Annotated[float, OURS] = 0.1,
    level: Annotated[float, OURS] = 0.05,
    examples: Annotated[int, PAPER] = 2,
    pool: Annotated[int, OURS] = 1000,
    success: Annotated[float, OURS] = 0.0,
) -> Algorithm:
    """eXplore-eXploit GRPO (XRPO).

    Each prompt gets `first` samples (None: half of a group, at least 2), and the rest of the step's samples are divided
    in `rounds`, one after the other to the prompt where one more is worth most. With n samples of a prompt so far, s
    the unbiased standard deviation of their rewards, and T samples of all prompts before the round

        h(n) = t_(1 - level/2, n - 1) s / sqrt(n);  Pi = h(n) - h(n + 1) + exploration sqrt(log(1 + T) / n)

    A prompt without a success (reward > success) so far gets its samples of a round with `examples` solved problems in
    front, those most like it of a pool of the `pool` problems solved last in the steps before; they are trained on
    under the plain prompt. examples 0: none. A bonus favours responses that are right but unlikely: with s_i the mean
    of log pi_old over a response's tokens under the plain prompt

        eta_i = exp(s_i - mean_g s)
        A+_i = A_i + min(max(novelty_coefficient (1 - eta_i), 0), kappa A_i)  where A_i > 0, else A_i

    on GRPO's A, then its loss with clip_low and clip_high and ratios to pi_old. A re-implementation adds the bonus to
    wrong responses too. The paper compares problems by embeddings of another model, here by the words of the problems
    (`neighbours.text_features`), and its pool may also hold solutions of the same step. Rollout:
    `rollouts.adaptive.in_rounds`, and curriculum: `curriculum.few_shot_memory.solved_examples`.
    """
    check_number("kappa", kappa, least=0)

    return Algorithm(
        transform=chain(
            group_relative(epsilon=1e-8), revised(with_novelty_bonus(novelty_coefficient, kappa), {"old_logp"})
        ),
        objective=policy_gradient(token_ratio("old"), clip(clip_low, clip_high), sequence_mean()),
        curriculum=solved_examples(examples, pool, success) if examples else None,
        rollout=in_rounds(
            by_confidence(exploration, level), first, rounds, solved=succeeds(success) if examples else None
        ),
    )
