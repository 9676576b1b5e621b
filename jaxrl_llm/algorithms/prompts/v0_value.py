"""V_0: A Generalist Value Model for Any Policy at State Zero."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.arguments.hyperparameters import CODE, OURS
from jaxrl_llm.core.arguments.ranges import Count, NonNegative, Positive
from jaxrl_llm.core.repr import part
from jaxrl_llm.curriculum.budgets import by_mixed, by_variance, divide
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.neighbours import word_features
from jaxrl_llm.curriculum.records import Array, PromptFacts, State
from jaxrl_llm.curriculum.rules import Outcome
from jaxrl_llm.curriculum.scores import least_tried
from jaxrl_llm.curriculum.success_models import ModelOf, SuccessModel
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
    require_choice("allocation", allocation, ("variance", "target"))
    budget = by_variance if allocation == "variance" else by_mixed(mixed_target)
    samples = divide(budget, neighbours(context, kernel_width, threshold), least=least_samples, most=most_samples)
    return replace(grpo(clip_low, clip_high, kl_coefficient), curriculum=choose_prompts(least_tried(), samples))


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
def neighbours(context: Count = 256, width: Positive = 0.2, threshold: float | None = 0.5) -> ModelOf:
    """Success rates predicted from the last `context` prompts tried.

    The prediction is `kernel_average` over the words of the prompts, `width` its kernel's. The label of a prompt is 1
    where its mean reward was at least `threshold`, else 0, or the mean reward itself if that is None. The metric
    curriculum/prediction_error is the last step's mean squared error.
    """

    def make(facts: PromptFacts) -> SuccessModel:
        rank, features = facts.rank, word_features(facts)

        def predict(state: State, ids: Array) -> Array:
            return kernel_average(features(ids), features(state["recent"]), state["labels"], width)

        def observe(state: State, outcome: Outcome) -> State:
            ids, mean = outcome.results.ids, outcome.results.mean
            labels = mean if threshold is None else (mean >= threshold).astype(np.float64)
            known, new = ~np.isin(state["recent"], ids), np.argsort(rank[ids])
            recent = np.concatenate([state["recent"][known], ids[new].astype(np.int32)])[-context:]
            error = float(np.mean((predict(state, ids) - labels) ** 2)) if len(labels) else 0.0
            after = np.concatenate([state["labels"][known], labels[new]])[-context:]
            return {"recent": recent, "labels": after, "error": error}

        start = {"recent": np.zeros(0, np.int32), "labels": np.zeros(0), "error": 0.0}
        return SuccessModel(
            lambda state, prompts, random: predict(state, prompts.ids), start, observe,
            lambda state: {"prediction_error": state["error"]},
        )  # fmt: skip

    return make
