"""Methods that use statistics of a group of samples: majority votes instead of labels, novelty, confidence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.advantages.multipliers import capped_bonus, novelty, relative_confidence, revised, row_mean
from jaxrl_llm.advantages.votes import vote
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import AverageName
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import chain
from jaxrl_llm.curriculum.few_shot_memory import solved_examples
from jaxrl_llm.objectives import clip, kl, policy_gradient, sequence_mean, token_ratio
from jaxrl_llm.objectives.averaging.averages import average_by_name
from jaxrl_llm.rollouts.adaptive import by_confidence, in_rounds
from jaxrl_llm.rollouts.guidance.repair import succeeds
from jaxrl_llm.rollouts.trees import entropy_forks
from jaxrl_llm.utils.errors import require_choice

__all__ = ["ettrl", "ttrl", "xrpo"]


def ttrl(
    keep: float | None = 32,
    ties: Literal["content", "first"] = "content",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
    average: AverageName = "sequence",
) -> Algorithm:
    """Test-Time Reinforcement Learning (TTRL, arXiv 2504.16084, 2025).

    No labels: the most frequent answer of a group of samples is taken to be right, and the reward is agreement with it:
    r_i = 1 where answer_i is the majority's, else 0, also for samples without an answer. `keep` of the group's samples
    (None: all) are trained on, with GRPO's advantages among them; they are chosen at random (released code: the first).
    ties between equally frequent answers are broken by "content", independent of the order of samples, or in favour of
    the "first" sample (released code). PPO's clip with clip_low and clip_high; kl_coefficient > 0 adds the k3 penalty.
    average: GRPO's "sequence", or "token" as in the released code; see
    `objectives.averaging.averages.average_by_name`.

    Answers are info["answer_key"] int32[N] (-1: none), which rewards such as number_match give, else whole completions.
    Special rollout: 64 votes per prompt.

    Defaults. Code: clip_low, clip_high, average. Recalled: keep, kl_coefficient. Ours: ties.
    """
    mean = average_by_name(average)
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), mean)
    objective += kl_coefficient * kl(to="reference", estimator="k3", average=mean)
    return Algorithm(chain(vote(keep, ties), group_relative()), objective)


@part
def confident(rule: str, limit: float, clamp: bool) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N, L]`: the advantages, changed by a rule of `ettrl`."""

    def credit(batch: Trajectories) -> jax.Array:
        A = batch.need("advantages")
        if rule == "clip":
            return jnp.clip(A, -limit, limit)
        entropy = jnp.where(jnp.isnan(batch.scores), jnp.nan, row_mean(batch.need("entropy"), batch.action_mask))
        return A * relative_confidence(entropy, batch.group, clamp)[:, None]

    return credit


def ettrl(
    rule: Literal["confidence", "clip"] = "confidence",
    limit: float = 2.0,
    clamp: bool = False,
    ties: Literal["content", "first"] = "content",
    trees: int = 12,
    forks: int = 2,
    branches: int = 2,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Algorithm:
    """Entropy-based test-time RL (ETTRL, arXiv 2508.11356, 2025).

    Rewards are agreement with the majority, as in TTRL (ties as there), and advantages depend on how confident a
    response is relative to its group, by the mean entropy H_i of its tokens. rule is one of

        "confidence"  A_i <- A_i (2 - H_i / mean_g H), the paper's Adv-Res; clamp: clamp the factor at 0
        "clip"        A_i <- clip(A_i, -limit, limit), its Adv-Clip

    on A = (r - mean_g) / std_g with the population standard deviation, then GRPO's loss (clip_low, clip_high).
    Rollout: `rollouts.trees.entropy_forks`, for each prompt `trees` completions, at the `forks` tokens of highest
    entropy of which `branches` others begin; all trees * (1 + forks * branches) vote, with their last numbers.

    Defaults. Paper: rule, limit, clamp, trees, forks, branches. Ours: ties, clip_low, clip_high.
    """
    require_choice("rule", rule, ("confidence", "clip"))
    check_number("limit", limit, above=0)

    return Algorithm(
        transform=chain(vote(None, ties), group_relative(ddof=0), revised(confident(rule, limit, clamp))),
        objective=policy_gradient(token_ratio(), clip(clip_low, clip_high), sequence_mean()),
        rollout=entropy_forks(trees, forks, branches),
    )


@part
def with_novelty_bonus(novelty_coefficient: float, kappa: float) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N, L]`: the advantages with the bonus of `xrpo` where they are above 0."""

    def lifted(batch: Trajectories) -> jax.Array:
        A = batch.need("advantages")
        s = jnp.where(jnp.isnan(batch.scores), jnp.nan, row_mean(batch.need("old_logp"), batch.action_mask))
        bonus = novelty_coefficient * novelty(s, batch.group)[:, None]
        return jnp.where(A > 0, capped_bonus(A, bonus, kappa), A)

    return lifted


def xrpo(
    novelty_coefficient: float = 2.5,
    kappa: float = 0.5,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    first: int | None = None,
    rounds: int = 2,
    exploration: float = 0.1,
    level: float = 0.05,
    examples: int = 2,
    pool: int = 1000,
    success: float = 0.0,
) -> Algorithm:
    """eXplore-eXploit GRPO (XRPO, arXiv 2510.06672, 2025).

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

    Defaults. Paper: novelty_coefficient, kappa, examples. Ours: clip_low, clip_high, first, rounds, exploration, level,
    pool, success.
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
