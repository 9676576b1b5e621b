"""Methods that sample failed groups again with hints, or with prompts that the policy rewrites."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

from jaxrl_llm.advantages.group import drop_rows, group_relative
from jaxrl_llm.advantages.subgroup_baselines import lower_where, uniform_among_others, within_kinds
from jaxrl_llm.algorithms.group_relative import grpo
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.choices import AverageName, Rewrite
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Array, Trajectories
from jaxrl_llm.core.transform import chain
from jaxrl_llm.curriculum.unsolved import without_solved
from jaxrl_llm.objectives.averaging.averages import Average, average_by_name
from jaxrl_llm.objectives.penalties import kl
from jaxrl_llm.objectives.policy_gradient import policy_gradient
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.surrogates import clip
from jaxrl_llm.rollouts.guidance.hints import beginnings, from_column, own_hint, own_levels
from jaxrl_llm.rollouts.guidance.repair import rescued, retried, rewritten, succeeds
from jaxrl_llm.utils.errors import require_choice

__all__ = ["clpo", "ghpo", "nurl", "sage_self_hint", "scaf_grpo"]


def ghpo(
    stages: int = 3,
    hints_from: int = 0,
    column: str = "solution",
    success: float = 0.0,
    accuracy: str | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
    epsilon: float = 1e-4,
    average: AverageName = "token",
    max_length: int | None = None,
) -> Algorithm:
    """Guided Hybrid Policy Optimization (GHPO, arXiv 2507.10628, 2025).

    A group in which no sample succeeds (reward > success; accuracy: this component of it) is sampled again under the
    prompt q* = q + the first i/(stages + 1) of the characters of a known solution (a column of the data set), for
    i = 1 ... stages until a sample succeeds; after the last stage the group is used as it is. With stages 3 these are
    25, 50 and 75 %. The last group replaces the others, and A_i = (r_i - mean_g)/(std_g + epsilon), its ratios and

        loss = -mean_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A)

    are under the prompt that it was sampled under. hints_from: the first step with hints (paper: about 20; released
    configuration: 0). kl_coefficient: of k3 to the reference. The released code uses the loss of GRPO or of BNPO by its
    configuration; average "token" is BNPO's with one micro-batch, "sequence" GRPO's, "constant" divides by max_length.
    The hint's words are ours. The paper adds half a format reward: name the other component as `accuracy`.

    Defaults. Paper: stages. Code: hints_from, success, kl_coefficient, epsilon. Ours: column, accuracy, clip_low,
    clip_high, average. Run: max_length.
    """
    base = grpo(clip_low, clip_high, kl_coefficient, epsilon=epsilon, average=average, max_length=max_length)
    program = retried(beginnings(column, stages), succeeds(success, accuracy), start=hints_from)
    return replace(base, rollout=program)


def scaf_grpo(
    hints_from: int | None = None,
    column: str = "hints",
    success: float = 0.0,
    accuracy: str | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    entropy_coefficient: float = 0.0,
    epsilon: float = 1e-6,
    average: AverageName = "token",
    max_length: int | None = None,
    total_steps: int | None = None,
) -> Algorithm:
    """Scaffolded Group Relative Policy Optimization (Scaf-GRPO, arXiv 2510.19807, 2025).

    Hints of several levels, written beforehand, are a column of the data set: a list of tiers (knowledge, planning,
    solution), each a list of parts; a level shows the first parts of one tier. For a group in which no sample succeeds
    (reward > success; accuracy: this component of it) one answer is sampled with each level. Of those that succeed the
    one of the lowest level replaces the first sample of the group, together with its prompt, so that it is on-policy;
    without one the group stays as it is. Then A_i = (r_i - mean_g)/(std_g + epsilon) with one success in G, and

        loss = -mean_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) - entropy_coefficient H

    hints_from: the first step with hints; None: after 15 % of total_steps, as the paper says, or step 50, as in the
    released script, where that is unknown. The options to train on the hinted answer under the plain prompt, or on
    both, are not implemented. The released code leaves out the second tier, and so may the column. average: see grpo
    ("constant" divides by max_length).

    Defaults. Paper: hints_from. Code: success, clip_low, clip_high, entropy_coefficient, epsilon, average.
    Ours: column, accuracy. Run: max_length, total_steps.
    """
    base = grpo(
        clip_low, clip_high, 0.0, entropy_coefficient, epsilon=epsilon, average=average, max_length=max_length
    )  # fmt: skip
    if hints_from is None:
        hints_from = 50 if total_steps is None else round(0.15 * total_steps)
    return replace(base, rollout=rescued(from_column(column), succeeds(success, accuracy), hints_from))


def nurl(
    source: Literal["own", "column"] = "own",
    column: str | None = None,
    hints_from: int | None = None,
    drop_solved: bool = True,
    success: float = 0.0,
    accuracy: str | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.0,
    ddof: int = 0,
    epsilon: float = 1e-6,
    average: AverageName = "token",
    max_length: int | None = None,
    total_steps: int | None = None,
) -> Algorithm:
    """Nudging with self-generated hints (NuRL, Nudging the Boundaries of LLM Reasoning, arXiv 2509.25666, 2025).

    A group of G without a success (reward > success; accuracy: this component of it) is discarded and replaced by G - 1
    samples under the prompt with an abstract hint and one under the plain prompt, which keeps the group from being all
    right. All else is GRPO: A_i = (r_i - mean_g)/(std_g + epsilon) with ddof 0, ratios under each sample's prompt, and

        loss = -mean_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coefficient k3

    source "own": the policy writes the hint from the answer in a column of the data set ("answer"): it explains the
    answer, then names the knowledge that is needed, without answer and steps. The paper does this once, with the first
    policy; here the policy of the step writes it. "column": hints written beforehand, in a column ("hint").

    hints_from: the step in which the second stage begins; before it, the method is GRPO. None: half of total_steps, or
    100 without it. The paper begins it when reward and validation accuracy have been flat for 10 steps, and first drops
    the prompts solved 8 of 8 times; here, with drop_solved, a prompt is dropped when, from that step on, all samples of
    its group succeed without a hint. average: see grpo ("constant" divides by max_length).

    Defaults. Paper: source, drop_solved, success. Ours: column, hints_from, accuracy, clip_low, clip_high,
    kl_coefficient, ddof, epsilon, average. Run: max_length, total_steps.
    """
    require_choice("source", source, ("own", "column"))
    if hints_from is None:
        hints_from = 100 if total_steps is None else total_steps // 2
    base = grpo(
        clip_low, clip_high, kl_coefficient, ddof=ddof, epsilon=epsilon, average=average, max_length=max_length
    )  # fmt: skip
    hints = own_hint(column or "answer") if source == "own" else from_column(column or "hint")
    program = retried(hints, succeeds(success, accuracy), 1, hints_from)
    return replace(
        base, rollout=program, curriculum=without_solved(success, accuracy, hints_from) if drop_solved else None
    )  # fmt: skip


def sage_self_hint(
    levels: int = 3,
    tries: int = 3,
    column: str = "solution",
    success: float = 0.0,
    accuracy: str | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    kl_coefficient: float = 0.0,
    ddof: int = 0,
    epsilon: float = 1e-6,
    average: AverageName = "token",
    max_length: int | None = None,
) -> Algorithm:
    """Self-hint aligned GRPO with privileged supervision (SAGE, arXiv 2602.03143, 2026).

    For a group without a success (reward > success; accuracy: this component of it) the policy of the step writes
    hints of rising strength, all `levels` in one answer, from the solution in a column of the data set: the key idea, a
    direction, detailed guidance, never the answer. For each level in turn the group is sampled again, all samples with
    the same hint, until one succeeds. The last group is trained on, with the hint h in its prompt: A_i = (r_i -
    mean_g)/(std_g + epsilon) with ddof 0, and

        loss = -mean_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coefficient k3,
        rho = pi(y_t | x, h, y_<t) / pi_behaviour(y_t | x, h, y_<t)

    tries: answers of the policy among which one must have a JSON list of that many texts; without one the group stays
    as it is (rollout/unhinted counts such groups; the released code takes an earlier step's hint). The paper writes
    A log pi, summed over tokens; its code has the clipped ratio of the base algorithm. average: see grpo ("constant"
    divides by max_length). The variant SAGE-light, with one level for each prompt that changes between epochs, is not
    implemented.

    Defaults. Paper: levels, success, clip_low, clip_high, kl_coefficient, ddof. Ours: tries, column, accuracy, epsilon,
    average. Run: max_length.
    """
    base = grpo(
        clip_low, clip_high, kl_coefficient, ddof=ddof, epsilon=epsilon, average=average, max_length=max_length
    )  # fmt: skip
    return replace(base, rollout=retried(own_levels(column, levels, tries), succeeds(success, accuracy)))


@part
def times(average: Average, weight: Callable[[Trajectories], Array], needs: Iterable[str] = ()) -> Average:
    """An average of values that are multiplied by `weight(batch)` f32[N] first, which is computed from `needs`."""

    def mean(values: Array, batch: Trajectories) -> Array:
        return average(values * weight(batch)[:, None], batch)

    return Average(mean, average.needs | frozenset(needs), average.refresh)


def clpo(
    hard: float = 0.3,
    medium: float = 0.7,
    rewrite: Rewrite = "both",
    hard_weight: float = 0.5,
    limit: int = 400,
    column: str = "answer",
    success: float = 0.0,
    accuracy: str | None = None,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    kl_coefficient: float = 0.001,
    epsilon: float = 1e-6,
    average: AverageName = "token",
    max_length: int | None = None,
) -> Algorithm:
    """Curriculum-guided Learning for Policy Optimization (CLPO, arXiv 2509.25004, 2025).

    Acc(q) is the share of a prompt's G samples that succeed (reward > success; accuracy: this component of it). The
    policy rewrites a problem with Acc <= hard in a simpler way, and one with Acc <= medium in other words, in at most
    `limit` tokens and without the answer, which is in a column of the data set and must stay the same. rewrite
    "hard_only" or "medium_only" leaves the others as they are. G samples of the new problem, q', are a group of their
    own. Groups in which all or no samples succeed are left out, unless there are no others. With
    A_i = (r_i - mean_g)/(std_g + epsilon) in each group

        loss = -mean_t min(rho A, clip(rho, 1 - clip_low, 1 + clip_high) A) + kl_coefficient mean_t s k3

    with s = hard_weight for samples of hard problems, rewritten or not, else 1. This is the first version, and the
    released code: rewriting has no gradient (the second trains it by Acc(q') - Acc(q), in a form that is not known).
    The code cuts the batch to a multiple of the devices; here it is filled up with rows that count nowhere. average:
    see grpo ("constant" divides by max_length).

    Defaults. Code: hard, medium, rewrite, hard_weight, limit, success, kl_coefficient, epsilon. Ours: column, accuracy,
    clip_low, clip_high, average. Run: max_length.
    """
    mean = average_by_name(average, max_length)
    objective = policy_gradient(token_ratio(), clip(clip_low, clip_high), mean)
    objective += kl_coefficient * kl(average=times(mean, lower_where("hard", hard_weight), {"hard"}))
    credit = chain(drop_rows(uniform_among_others), group_relative(epsilon=epsilon))
    return Algorithm(
        within_kinds("rewritten", credit),
        objective,
        rollout=rewritten(succeeds(success, accuracy), hard, medium, rewrite, column, limit),
    )
