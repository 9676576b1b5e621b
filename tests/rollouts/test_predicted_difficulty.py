"""The predictor of success rates: its formula by a loop, its derivatives by differences, and that it learns."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from jaxrl_llm.algorithms.prompts import dots_rr
from jaxrl_llm.algorithms.prompts.dots_rr import cross_entropy, fitted, predict, start_predictor

OTHER = np.array([0.7, 0.3, -0.5, 0.4, 0.2, 0.6, -0.3])


def some(seed: int, n: int = 5, K: int = 7, D: int = 4) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(seed)
    queries, keys = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in random.normal(size=(2, max(n, K), D)))
    return queries[:n].astype(np.float32), keys[:K].astype(np.float32), random.integers(0, 9, K) / 8


def by_loop(predictor: Any, query: Any, keys: Any, labels: Any) -> float:
    a, m, s = math.exp(predictor[0]), float(np.mean(labels)), float(np.std(labels))
    weights = [math.exp(a * float(np.dot(query, key))) for key in keys]
    p0 = sum(w * d for w, d in zip(weights, labels, strict=True)) / sum(weights)
    p0 = min(max(p0, 1e-4), 1 - 1e-4)
    u, v = (c[0] + c[1] * m + c[2] * s for c in (predictor[1:4], predictor[4:7]))
    scale = min(max(math.log(1 + math.exp(u)), 1e-2), 10.0)
    return 1 / (1 + math.exp(-(math.log(p0 / (1 - p0)) / scale + math.tanh(v))))


def test_the_worked_example_of_attention() -> None:
    """With h = 2 the paper's product is divided by sqrt(2), which is the width here."""
    keys, labels = np.array([[1.0, 0], [0, 1], [1, 1]]), np.array([0.2, 0.8, 0.5])
    np.testing.assert_allclose(predict(start_predictor(2**0.5), keys[:1], keys, labels), [0.438999], atol=1e-6)


@pytest.mark.parametrize("predictor", [start_predictor(), OTHER], ids=["start", "other"])
def test_it_is_the_loop(predictor: Any) -> None:
    queries, keys, labels = some(1)
    expected = [by_loop(predictor, query, keys, labels) for query in queries]
    np.testing.assert_allclose(predict(predictor, queries, keys, labels), expected, rtol=1e-6)


def test_at_the_start_it_is_plain_attention() -> None:
    queries, keys, labels = some(2)
    weight = np.exp(4.0 * queries @ keys.T)
    expected = weight @ labels / weight.sum(axis=1)
    np.testing.assert_allclose(predict(start_predictor(0.25), queries, keys, labels), expected, rtol=1e-5)


def test_its_slopes_are_differences() -> None:
    queries, keys, labels = some(3)
    found = dots_rr._forward(OTHER, queries, keys, labels)[1]

    def logits(predictor: Any) -> Any:
        p = predict(predictor, queries, keys, labels)
        return np.log(p / (1 - p))

    for place, step in enumerate(1e-5 * np.eye(7)):
        slope = (logits(OTHER + step) - logits(OTHER - step)) / 2e-5
        np.testing.assert_allclose(found[:, place], slope, rtol=1e-5, atol=1e-8)


def test_it_learns_from_rates_of_similar_prompts() -> None:
    """Two kinds of prompts, one solved and one not: it comes to trust its neighbours, never getting worse."""
    random = np.random.default_rng(0)
    kind = np.arange(16) % 2
    points = np.eye(2)[kind] + 0.05 * random.normal(size=(16, 2))
    points = (points / np.linalg.norm(points, axis=1, keepdims=True)).astype(np.float32)
    rates = np.where(kind, 0.9, 0.1)
    known = points[:8], rates[:8], points[8:], rates[8:]
    before = start_predictor(1.0)
    after = fitted(before, *known, steps=60)
    losses = [cross_entropy(predict(one, known[0], *known[2:]), known[1]) for one in (before, after)]
    entropy = -(0.9 * math.log(0.9) + 0.1 * math.log(0.1))
    assert losses[1] < losses[0] - 0.1
    assert losses[1] - entropy < 0.02
    assert fitted(before, *known, steps=0) is before
    assert fitted(before, points[:0], rates[:0], points, rates) is before
    assert fitted(before, points, rates, points[:0], rates[:0]) is before
