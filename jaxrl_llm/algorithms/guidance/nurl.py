from dataclasses import replace
from typing import Literal

import numpy as np

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, method
from jaxrl_llm.core.annotations import AverageName, Count, NonNegative, OfRun, Ours, Paper, ZeroOrOne
from jaxrl_llm.core.parts import Trajectories, batch_part
from jaxrl_llm.core.source import Step
from jaxrl_llm.curriculum import scores
from jaxrl_llm.curriculum.compose import in_epochs
from jaxrl_llm.rollouts.guidance.hints import from_column, own_hint
from jaxrl_llm.rollouts.guidance.repair import retried, succeeds


@method(
    paper="arXiv 2509.25666",
    test="test_own_rollouts.py::test_nurl_samples_a_failed_group_again_but_for_one_without_the_hint",
)
def nurl(
    source: Paper[Literal["own", "column"]] = "own",
    column: Ours[str | None] = None,
    hints_from: Ours[int | None] = None,
    drop_solved: Paper[bool] = True,
    success: Paper[float] = 0.0,
    accuracy: Ours[str | None] = None,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.0,
    ddof: Ours[ZeroOrOne] = 0,
    epsilon: Ours[NonNegative] = 1e-6,
    average: Ours[AverageName] = "token",
    max_length: OfRun[Count | None] = None,
    total_steps: OfRun[Count | None] = None,
) -> Algorithm:
    """Nudging with self-generated hints (NuRL, Nudging the Boundaries of LLM Reasoning).

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
    """
    if hints_from is None:
        hints_from = 100 if total_steps is None else total_steps // 2
    base = grpo(
        clip_low, clip_high, kl_coefficient, ddof=ddof, epsilon=epsilon, average=average, max_length=max_length
    )  # fmt: skip
    hints = own_hint(column or "answer") if source == "own" else from_column(column or "hint")
    program = retried(hints, succeeds(success, accuracy), 1, hints_from)
    solved = scores.drop_solved(measure=all_succeed(success, accuracy), start=hints_from)
    return replace(base, rollout=program, curriculum=in_epochs(solved) if drop_solved else None)


@batch_part
def all_succeed(step: Step, success: float = 0.0, accuracy: str | None = None) -> tuple[np.ndarray, np.ndarray]:
    """1 for prompts with a group in which every sample succeeds, as in `repair.succeeds`, and none was guided; else 0.

    A guided sample is one with info["guided"].
    """
    ids = np.unique(np.asarray(step.scored.batch.prompt_id))
    return ids, np.isin(ids, solved_prompts(step.scored.batch, success, accuracy)).astype(np.float64)


def solved_prompts(batch: Trajectories, success: float, accuracy: str | None = None) -> np.ndarray:
    """int[...]: ids of the prompts with a group in which every row with actions succeeds, and none was guided."""
    value = np.asarray(batch.need("reward") if accuracy is None else (batch.rewards or {})[accuracy])
    guided = np.asarray((batch.info or {}).get("guided", np.zeros(len(value))))
    action = np.asarray(batch.action_mask).any(axis=1)
    right = (value > success) & ~(guided == 1)
    group = np.asarray(batch.group)
    failed, tried = np.unique(group[action & ~right]), np.unique(group[action])
    return np.unique(np.asarray(batch.prompt_id)[action & np.isin(group, np.setdiff1d(tried, failed))])
