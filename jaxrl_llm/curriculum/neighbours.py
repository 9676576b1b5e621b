"""A rule of a curriculum that predicts success rates from similar prompts, and divides a step's samples by them."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.curriculum.budgets import apportion, check_budget, smallest_mixed
from jaxrl_llm.curriculum.compose import Machine, RuleOf
from jaxrl_llm.curriculum.records import Array, PromptFacts, Prompts, State
from jaxrl_llm.rollouts.runtime.group_results import Results
from jaxrl_llm.utils.errors import require_choice

WIDTH = 256  # numbers that describe a prompt


def text_features(text: str) -> Array:
    """f32[256] of norm 1: counts of a text's words and pairs of words, hashed with signs; zeros for an empty text."""
    words = re.findall(r"\w+|[^\w\s]", text.lower())
    out = np.zeros(WIDTH, np.float32)
    for one in [*words, *map(" ".join, pairwise(words))]:
        code = zlib.crc32(one.encode())
        out[code % WIDTH] += 1 if code & 0x10000 else -1
    return out / max(float(np.linalg.norm(out)), 1e-9)


def kernel_average(
    queries: Array, context: Array, labels: Array, width: float, prior: float = 0.5, weight: float = 1.0
) -> Array:
    """f64[n]: the average of the labels f64[C] of context prompts, weighted by similarity, and of the prior.

    queries f32[n, D], context f32[C, D], rows of norm 1; the weight of a label is exp((cosine - 1) / width), that of
    the prior `weight`.
    """
    near = np.exp((queries @ context.T - 1) / width)
    return (weight * prior + near @ labels) / (weight + near.sum(axis=1))


def features_of(row: Mapping[str, Any]) -> Array:
    """`text_features` of a row's prompt, a text or messages."""
    prompt = row["prompt"]
    return text_features(
        prompt if isinstance(prompt, str) else " ".join(str(turn.get("content") or "") for turn in prompt)
    )


@part
def samples_by_neighbours(
    weight: Literal["variance", "target"] = "variance",
    context: int = 256,
    width: float = 0.2,
    threshold: float | None = 0.5,
    target: float = 0.9,
    least: int = 1,
    most: int | None = None,
) -> RuleOf:
    """Divide a step's samples by success rates p that are predicted from the last `context` prompts tried.

    The prediction is `kernel_average` over the words of the prompts, `width` its kernel's. The label of a prompt is 1
    where its mean reward was at least `threshold`, else 0, or the mean reward itself if that is None. weight: samples
    in proportion to "variance" p (1 - p), or the smallest group that is mixed with probability `target`; from `least`
    to `most` each; the total is exact. The metric curriculum/prediction_error is the last step's mean squared error.
    """
    require_choice("samples_by_neighbours: weight", weight, ("variance", "target"))
    check_number("samples_by_neighbours: context", context, least=1, whole=True)
    check_number("samples_by_neighbours: width", width, above=0)
    check_number("samples_by_neighbours: threshold", threshold, or_none=True)
    check_number("samples_by_neighbours: target", target, above=0, below=1)
    check_number("samples_by_neighbours: least", least, least=1, whole=True)
    check_number("samples_by_neighbours: most", most, least=1, whole=True, or_none=True)

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
