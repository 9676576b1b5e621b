"""V_0: A Generalist Value Model for Any Policy at State Zero."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

import numpy as np

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import CODE, OURS
from jaxrl_llm.core.ranges import Count, NonNegative, OpenFraction, Positive
from jaxrl_llm.core.repr import part
from jaxrl_llm.curriculum.budgets import apportion, check_budget, smallest_mixed
from jaxrl_llm.curriculum.compose import Machine, RuleOf, choose_prompts
from jaxrl_llm.curriculum.neighbours import WIDTH, features_of
from jaxrl_llm.curriculum.records import Array, PromptFacts, Prompts, State
from jaxrl_llm.curriculum.scores import least_tried
from jaxrl_llm.rollouts.runtime.group_results import Results
from jaxrl_llm.utils.errors import require_choice


@method(
    paper="arXiv 2602.03584",
    year=2026,
    test="test_curricula.py::test_v0_is_a_kernel_average_by_loop",
    lacks={
        "value_model": (
            "a pretrained model of values that reads other prompts' results; these are averaged over prompts with "
            "alike words",
            "a value model of prompts",
        )
    },
)
def v0_value(
    allocation: Annotated[Literal["variance", "target"], OURS] = "variance",
    context: Annotated[int, OURS] = 256,
    kernel_width: Annotated[float, OURS] = 0.2,
    threshold: Annotated[float, CODE] = 0.5,
    mixed_target: Annotated[float, OURS] = 0.9,
    least_samples: Annotated[int, OURS] = 2,
    most_samples: Annotated[int, OURS] = 32,
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    kl_coefficient: Annotated[NonNegative, OURS] = 0.0,
) -> Algorithm:
    """V_0: A Generalist Value Model for Any Policy at State Zero.

    Predicts the policy's success rate p on a prompt before it is sampled, from the outcomes of the last `context`
    prompts, and divides a step's samples by it. The labels are 1 where the mean reward was at least `threshold`.

        p(x) = (1/2 + sum_j k(x, x_j) z_j) / (1 + sum_j k(x, x_j)),    k = exp((cos(x, x_j) - 1) / kernel_width)

    with the cosine of counts of words and pairs of words. allocation "variance" gives samples in proportion to
    p (1 - p); "target" the smallest group that has right and wrong samples with probability mixed_target. Each prompt
    gets from least_samples to most_samples, and all of them the step's total. Credit and loss are GRPO's (clip_low,
    clip_high, kl_coefficient).

    The paper's predictor is a pretrained tabular network over text embeddings, an external model; the kernel average
    has its interface. The paper's rule for the allocation was not available: both rules are ours.
    """
    budget = samples_by_neighbours(
        allocation, context, kernel_width, threshold, mixed_target, least_samples, most_samples
    )
    return replace(grpo(clip_low, clip_high, kl_coefficient), curriculum=choose_prompts(least_tried(), budget))


def kernel_average(
    queries: Array, context: Array, labels: Array, width: float, prior: float = 0.5, weight: float = 1.0
) -> Array:
    """f64[n]: the average of the labels f64[C] of context prompts, weighted by similarity, and of the prior.

    queries f32[n, D], context f32[C, D], rows of norm 1; the weight of a label is exp((cosine - 1) / width), that of
    the prior `weight`.
    """
    near = np.exp((queries @ context.T - 1) / width)
    return (weight * prior + near @ labels) / (weight + near.sum(axis=1))


@part
def samples_by_neighbours(
    weight: Literal["variance", "target"] = "variance",
    context: Count = 256,
    width: Positive = 0.2,
    threshold: float | None = 0.5,
    target: OpenFraction = 0.9,
    least: Count = 1,
    most: Count | None = None,
) -> RuleOf:
    """Divide a step's samples by success rates p that are predicted from the last `context` prompts tried.

    The prediction is `kernel_average` over the words of the prompts, `width` its kernel's. The label of a prompt is 1
    where its mean reward was at least `threshold`, else 0, or the mean reward itself if that is None. weight: samples
    in proportion to "variance" p (1 - p), or the smallest group that is mixed with probability `target`; from `least`
    to `most` each; the total is exact. The metric curriculum/prediction_error is the last step's mean squared error.
    """
    require_choice("samples_by_neighbours: weight", weight, ("variance", "target"))

    def make(facts: PromptFacts) -> Machine:
        rank = np.empty(facts.size, np.int64)
        rank[facts.order] = np.arange(facts.size)

        def features(ids: Array) -> Array:
            found = [features_of(facts.rows[int(i)]) for i in ids]
            return np.stack(found) if found else np.zeros((0, WIDTH), np.float32)

        def predict(state: State, ids: Array) -> Array:
            return kernel_average(features(ids), features(state["recent"]), state["labels"], width)

        def counts(state: State, prompts: Prompts, total: int, random: np.random.Generator) -> Array:
            check_budget("samples_by_neighbours", len(prompts.ids), total, least, most)
            p = predict(state, prompts.ids)
            wanted = p * (1 - p) if weight == "variance" else smallest_mixed(p, target, most or total)
            return apportion(wanted, total, least, most)

        def observe(state: State, results: Results, before: Prompts, everything: Any) -> State:
            labels = results.mean if threshold is None else (results.mean >= threshold).astype(np.float64)
            known, new = ~np.isin(state["recent"], results.ids), np.argsort(rank[results.ids])
            recent = np.concatenate([state["recent"][known], results.ids[new].astype(np.int32)])[-context:]
            error = float(np.mean((predict(state, results.ids) - labels) ** 2)) if len(labels) else 0.0
            after = np.concatenate([state["labels"][known], labels[new]])[-context:]
            return {"recent": recent, "labels": after, "error": error}

        start = {"recent": np.zeros(0, np.int32), "labels": np.zeros(0), "error": 0.0}
        metrics: Any = lambda state: {"prediction_error": state["error"]}  # noqa: E731
        return Machine(start, counts=counts, observe=observe, metrics=metrics)

    return make
