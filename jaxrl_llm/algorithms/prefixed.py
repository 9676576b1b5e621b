"""Methods whose completions begin with given tokens, and methods that ask second questions about a problem.

Given tokens are conditioned on and masked out of the loss. The answers to a second question are a group of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import jax
import jax.numpy as jnp

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.advantages.kl_rewards import kl_reward
from jaxrl_llm.advantages.returns import generalised_advantages, whiten_advantages
from jaxrl_llm.advantages.tokens.rewards import whiten_rewards
from jaxrl_llm.advantages.zero_variance_groups import at_most_parts, informative_relative
from jaxrl_llm.algorithms.group_relative import grpo
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import Scale
from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import chain
from jaxrl_llm.curriculum.failed_prompts import hard_buffer
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.values import value_loss
from jaxrl_llm.rewards.transforms import rescore
from jaxrl_llm.rollouts.auxiliary_prompts import recycled, with_predictions
from jaxrl_llm.rollouts.guidance.candidates import with_candidates
from jaxrl_llm.rollouts.guidance.prefixes import prefixed_groups, reset_to_data
from jaxrl_llm.rollouts.thinking_modes import tagged
from jaxrl_llm.utils.errors import is_off

__all__ = ["a2fm_apo", "drpo_dataset_reset", "masa", "prefixrl", "spark_co_evolving", "zppo"]


@part
def unless_cut_off(score: float) -> Callable[[Trajectories], jax.Array]:
    """A function `batch -> f32[N]`: the scores, but `score` for rows that reached the token limit."""
    return lambda b: jnp.where(b.truncated, score, b.scores)


def drpo_dataset_reset(
    column: str = "response",
    share: float = 1.0,
    no_end_score: float | None = -1.0,
    kl_coefficient: float = 0.05,
    gamma: float = 1.0,
    lam: float = 0.95,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    value_clip: float | None = 0.2,
    value_coefficient: float = 0.1,
) -> Algorithm:
    """Dataset Reset Policy Optimization (DR-PO, arXiv 2404.08495, 2024).

    PPO whose completions do not all start at the prompt. With probability `share` a sample is reset to a state of the
    data: with y* the response of the row's `column`, of L >= 2 tokens, it is given y*_1 ... y*_h, h uniform from 1 to
    L - 1, and the policy writes the rest; otherwise h = 0. The score is that of the whole text (no_end_score where it
    has no end token; None: its own score). Every action's reward gets -kl_coefficient (logp - logp_ref), rewards are
    divided by their standard deviation (about their mean, which stays), and with A from GAE (gamma, lam), R = A + V,
    and A then whitened,

        loss = -mean_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)
               + value_coefficient/2 mean_t max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2)

    over the policy's own tokens t > h. The released code takes the value loss and the moments of rewards and advantages
    over the given tokens too, which also have a KL reward there. A given token comes before every action, so that apart
    from these moments A and R of the actions are the same without it; here the critic learns from the policy's own
    tokens only. Each sample draws its own h: the critic is the baseline, and no group is compared.

    Defaults. Paper: clip_low, clip_high. Code: share, no_end_score, kl_coefficient, gamma, lam, value_clip,
    value_coefficient. Ours: column.
    """
    transforms = [
        *([] if no_end_score is None else [rescore(unless_cut_off(no_end_score))]),
        *([] if is_off(kl_coefficient) else [kl_reward(kl_coefficient)]),
        whiten_rewards(),
        generalised_advantages(gamma, lam),
        whiten_advantages(),
    ]
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), token_mean())
    objective += value_coefficient * value_loss(value_clip)
    return Algorithm(chain(*transforms), objective, rollout=reset_to_data(column, share))


def prefixrl(
    column: str = "trace",
    prefix_low: float = 0.4,
    prefix_high: float = 0.8,
    prefixes: int = 1,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
) -> Algorithm:
    """On-policy RL on prefixes of off-policy traces (PrefixRL, Reuse your FLOPs, arXiv 2601.18795, 2026).

    The prompts are all problems x, and for hard ones also (x, y*_1 ... y*_k), with y* a right trace that was found
    before, by rejection sampling or by another model. The trace's beginning is given as if the policy had written it:

        o ~ pi(. | x, y*_1 ... y*_k),    r = reward of y*_1 ... y*_k o,    A = (r - mean)/(std + 1e-6)

    over the samples of one context (x, k), and GRPO's clipped loss (clip_low, clip_high; kl_coefficient times k3) on o
    alone: no likelihood and no importance weight of the prefix. The method is a choice of contexts, so any on-policy
    loss would do.

    Rollout: a row's `column` stores its traces, a text or a list of texts, and is empty for problems that are not hard.
    A visit of a hard problem makes the plain group and `prefixes` more, each of one trace, cut at a share of its length
    that is uniform from prefix_low to prefix_high. Traces come from `jaxrl sample`, say; the method does not look for
    them. A step has more rows than prompts_per_step x group_size where problems are hard. Without traces it is GRPO.

    Defaults. Paper: kl_coefficient. Recalled: prefix_low, prefix_high. Ours: column, prefixes, clip_low, clip_high.
    """
    plain = grpo(clip_low, clip_high, kl_coefficient)
    return replace(plain, rollout=prefixed_groups(column, prefix_low, prefix_high, prefixes))


def a2fm_apo(
    tags: str = "<instant>,<reasoning>",
    forced: int = 2,
    alpha: float = 2.0,
    easy: float = 0.5,
    by: Literal["first", "all"] = "first",
    agentic: str = "<agentic>",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
) -> Algorithm:
    """Adaptive Policy Optimization over modes (APO, A2FM, arXiv 2510.12838, 2025).

    The policy first writes the tag of a mode, such as to answer at once or to reason. A group has `forced` samples of
    each mode, whose tag is given and masked out of the loss, and free ones, which write the tag. With r_acc the score
    of the response, r_fmt = 1 if it begins with exactly one of the `tags`, else 0, and p the success rate of the forced
    samples (score > 0.5), of the first tag's mode (by "first") or of all (by "all"),

        R = r_acc r_fmt r_adaptive,    r_adaptive = 1 - p^alpha for a free sample in another mode than the first,
                                       if the question is easy: p >= easy; else 1
        A = (R - mean)/(std + 1e-6)    over the whole group, population std

    and GRPO's clipped loss (clip_low, clip_high; kl_coefficient times k3) on the policy's own tokens. Which forced
    samples define p, and when a question is easy, is an open point of the description; the figure of the released
    repository counts those of the instant mode, and calls 1/2 easy. Its rewards of 0.8 are illustrative: the formula
    gives 0.75.

    The first tag is the cheapest mode. The group has group_size samples, more than forced times the number of modes.
    Runs with --tools or --environment have one mode more, of the tag `agentic`, and their samples are episodes, whose
    first reply has the tag. Observations are masked. The templates of the modes were not available to us: here an
    episode whose first reply has one tag has r_fmt = 1 if it goes on after that reply, as after a call of a tool, in
    the agentic mode and in no other. The supervised stage before, which teaches the policy the tags, is not included.

    Defaults. Paper: alpha. Code: forced, easy, by. Ours: tags, agentic, clip_low, clip_high, kl_coefficient.
    """
    plain = grpo(clip_low, clip_high, kl_coefficient, ddof=0)
    return replace(plain, rollout=tagged(tags, forced, alpha, easy, by, agentic=agentic))


def masa(
    predictions: int | None = None,
    levels: int = 8,
    base: float = 0.01,
    inclusive: bool = False,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    scale: Scale = "std",
    ddof: int = 1,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Meta-Awareness via Self-Alignment (MASA, arXiv 2510.03259, 2025).

    Beside its solutions of a problem, the policy answers a second prompt, which asks for a prediction of them: their
    length l, the share d of right ones (a whole number of `levels`), and the notions they use. With l_i, c_i and t_i
    the tokens, correctness (score > 0.5) and text of solution i,

        r_length = 1 if min_{c_i = 1} l_i < l < max_{c_i = 1} l_i, else 0     (inclusive: <=; the paper's form)
        r_rate   = base^|d - mean c|
        r_notion = share of the predicted notions, without those of the problem's text, that more right than wrong t_i
                   contain
        r        = (r_length + r_rate + r_notion)/3, with 0 for a field that is missing

    Predictions (as many as solutions where `predictions` is None) are a group of their own with A = (r - mean)/std,
    like the solutions with their scores (`scale` is the divisor), and one token mean of the clipped surrogate
    (clip_low, clip_high, dual_clip) is over both; no KL. Notions are compared as text, in lower case and
    without the s of a plural.

    A step has more rows than prompts_per_step x group_size: those of the predictions. The paper's faster variant, which
    clones expert predictions, skips problems by their predicted rate and stops long solutions, is not included.

    Defaults. Paper: predictions, base, clip_low, clip_high. Code: levels, inclusive, dual_clip, scale, ddof, epsilon.
    """
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high, dual_clip), token_mean())
    credit = group_relative(scale, ddof=ddof, epsilon=epsilon)
    return Algorithm(credit, objective, rollout=with_predictions(predictions, levels, base, inclusive))


def spark_co_evolving(
    share: float = 0.5,
    pointwise: float = 0.3,
    whole: float = 0.5,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.001,
) -> Algorithm:
    """Synergistic Policy And Reward Co-Evolving Framework (SPARK, arXiv 2509.22624, 2025).

    The scored samples of a problem become questions with known answers, and the policy that answers them learns to
    judge and to correct its own responses:

        all right    "is the answer a_1 right?": yes
        all wrong    "is the answer a_j right?", j random: no
        mixed        with probability `pointwise` "is a_j right?", j right or wrong alike;
                     else "which of a_i and a_j is right?", one right and one wrong in random order: A or B
        any wrong    the problem again, with a wrong attempt: its whole text with probability `whole`, else its answer

    A judgement's reward is 1 if its boxed answer is the label, a correction's is the run's. Each question has a group
    of its own, and every group the loss of GRPO (clip_low, clip_high, kl_coefficient times k3, A = (r - mean)/std).

    share: the probability with which a problem's judging question is asked, and its correcting one. The released code
    asks 32 of each among 64 problems at most, in an update of their own once a cache has enough of them; here questions
    are answered in the step that makes them, and share its update. It has more rows then, but the policy that answers
    is the one that is judged. Questions about questions are not asked. Images are out of scope.

    Defaults. Paper: kl_coefficient. Code: share, pointwise, whole, clip_low, clip_high.
    """
    return replace(grpo(clip_low, clip_high, kl_coefficient), rollout=recycled(share, pointwise, whole))


def zppo(
    column: str = "teacher",
    threshold: float = 0.5,
    teachers: int = 4,
    words: int = 512,
    rewriter: str | None = None,
    replay_share: float = 0.25,
    second_share: float = 0.25,
    most_stored: int = 10_000,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = 10.0,
    epsilon: float = 1e-6,
) -> Algorithm:
    """Zone of Proximal Policy Optimization (ZPPO, arXiv 2606.18216, 2026).

    A frozen teacher answers in the prompts of hard problems, and every trained token is the policy's. A problem x whose
    samples have a mean reward rbar_x < threshold gets groups of further prompts:

        BCQ    a right response of the teacher and a wrong sample, shuffled: one is right, one is wrong
        NCQ    all wrong samples, and the distinct answers that they state

    BCQ needs a right one among `teachers` responses. Of these groups a step keeps second_share times the number of new
    problems, in ascending order of rbar_x, BCQ before NCQ. With S the groups whose rewards differ,

        A'_i = r_i - mean_g,    A_i = (A'_i - mu_S)/(sigma_S + epsilon) in S, else 0

    with moments over all rows of S, and the loss is a token mean of the clipped surrogate (clip_low, clip_high,
    dual_clip), without KL. Problems with rbar_x < threshold enter a buffer of most_stored problems, first in, first
    out, and leave it when rbar_x >= threshold; replay_share times as many problems as new ones are drawn from it.

    Rollout: the row's `column` has the teacher's responses, a text or a list of texts: the teacher is frozen, so it
    may answer before the run. Candidates are rewritten in at most `words` tokens, by `rewriter` (FILE.py:FUNCTION of
    problem and solution, a call of the teacher, as in the paper) or, with None, by the policy. Groups beyond the bound
    are sampled and left out, because which are kept is known only when all problems are answered.

    Defaults. Paper: threshold, teachers, words, replay_share, second_share, most_stored, clip_low, clip_high,
    dual_clip. Ours: column, rewriter, epsilon.
    """
    check_number("replay_share", replay_share, least=0)
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high, dual_clip), token_mean())
    return Algorithm(
        chain(at_most_parts(second_share, replay_share, threshold, most_stored), informative_relative(epsilon)),
        objective,
        curriculum=hard_buffer(replay_share, threshold, most_stored),
        rollout=with_candidates(column, threshold, teachers, words, rewriter),
    )
