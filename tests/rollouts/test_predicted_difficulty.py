"""The predictor of success rates: its formula by a loop, what it learns from, and that it predicts held-out prompts."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from choosing import near_predicted, results, rows_of
from optax import sigmoid_binary_cross_entropy as cross_entropy

from jaxrl_llm.algorithms.prompts.dots_rr import predicted_logits, predictor_of, round_loss, start_predictor
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.embedded import earlier_rounds
from jaxrl_llm.curriculum.networks import attended
from jaxrl_llm.curriculum.records import prompt_facts
from jaxrl_llm.utils.errors import InputError


def some(seed: int, n: int = 5, K: int = 7, D: int = 4) -> tuple[Any, Any, Any]:
    random = np.random.default_rng(seed)
    queries, keys = random.normal(size=(n, D)), random.normal(size=(K, D))
    return queries.astype(np.float32), keys.astype(np.float32), random.integers(0, 9, K) / 8


def moved(tree: Any, seed: int) -> Any:
    """The parameters with noise, so that none is 0 or 1."""
    leaves, shape = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return jax.tree.unflatten(
        shape, [x + 0.3 * jax.random.normal(key, x.shape) for x, key in zip(leaves, keys, strict=True)]
    )


def norm_by_loop(layer: Any, x: list[float]) -> list[float]:
    mean = sum(x) / len(x)
    variance = sum((one - mean) ** 2 for one in x) / len(x)
    gain, shift = np.asarray(layer["gain"], float), np.asarray(layer["shift"], float)
    return [gain[i] * (x[i] - mean) / math.sqrt(variance + 1e-5) + shift[i] for i in range(len(x))]


def linear_by_loop(layer: Any, x: list[float]) -> list[float]:
    weight, bias = np.asarray(layer["weight"], float), np.asarray(layer["bias"], float)
    return [bias[j] + sum(x[i] * weight[i, j] for i in range(len(x))) for j in range(len(bias))]


def gelu(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def mlp_by_loop(params: Any, x: Any) -> list[float]:
    values = [float(one) for one in x]
    for norm, layer in zip(params["norms"], params["layers"], strict=False):
        values = [gelu(one) for one in linear_by_loop(layer, norm_by_loop(norm, values))]
    return norm_by_loop(params["norms"][-1], values)


def by_loop(params: Any, query: Any, keys: Any, labels: Any) -> float:
    f, m, s = mlp_by_loop(params["query"], query), float(np.mean(labels)), float(np.std(labels))
    g = [mlp_by_loop(params["key"], key) for key in keys]
    weights = [math.exp(sum(a * b for a, b in zip(f, one, strict=True)) / math.sqrt(len(f))) for one in g]
    p0 = sum(w * d for w, d in zip(weights, labels, strict=True)) / sum(weights)
    p0 = min(max(p0, 1e-4), 1 - 1e-4)
    first, last = params["calibration"]
    u, v = linear_by_loop(last, [gelu(one) for one in linear_by_loop(first, [m, s])])
    scale = min(max(math.log(1 + math.exp(u)), 1e-2), 10.0)
    return math.log(p0 / (1 - p0)) / scale + math.tanh(v)


PARAMS = moved(start_predictor(jax.random.key(0), 4, 6, 3), 1)


def test_the_worked_example_of_attention() -> None:
    keys, labels = jnp.array([[1.0, 0], [0, 1], [1, 1]]), jnp.array([[0.2], [0.8], [0.5]])
    known = jnp.ones((1, 3), bool)
    np.testing.assert_allclose(attended(keys[:1], keys, labels, known), [[0.438999]], atol=1e-6)
    w = attended(keys[:1], keys, jnp.eye(3), known)
    np.testing.assert_allclose(w, [[0.401112, 0.197776, 0.401112]], atol=1e-6)


def test_it_is_the_loop() -> None:
    queries, keys, labels = some(1)
    expected = [by_loop(PARAMS, query, keys, labels) for query in queries]
    found = predicted_logits(PARAMS, queries, keys, jnp.asarray(labels, jnp.float32), jnp.ones((1, 7), bool))
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)


def test_at_the_start_it_is_attention_alone() -> None:
    """The calibration changes nothing before it has learned."""
    queries, keys, labels = some(2)
    params = start_predictor(jax.random.key(3), 4, 6, 2)
    found = jax.nn.sigmoid(
        predicted_logits(params, queries, keys, jnp.asarray(labels, jnp.float32), jnp.ones((1, 7), bool))
    )
    for query, p in zip(queries, found, strict=True):
        f = mlp_by_loop(params["query"], query)
        weights = np.exp([np.dot(f, mlp_by_loop(params["key"], key)) / 6**0.5 for key in keys])
        np.testing.assert_allclose(p, weights @ labels / weights.sum(), rtol=1e-4)


def test_a_round_is_predicted_from_its_others() -> None:
    """The loss is the mean over rates of the cross-entropy of each, predicted from the others; none is NaN."""
    _, keys, labels = some(4)
    rates = np.array([*labels, np.nan, np.nan])
    embedded = np.concatenate([keys, 9 * np.ones((2, 4), np.float32)])
    losses = []
    for i in range(7):
        p = 1 / (1 + math.exp(-by_loop(PARAMS, keys[i], np.delete(keys, i, 0), np.delete(labels, i))))
        losses.append(-(labels[i] * math.log(p) + (1 - labels[i]) * math.log(1 - p)))
    given, asked = (jnp.asarray(embedded), jnp.asarray(rates, jnp.float32)), np.arange(9) % 3 > 0
    found = round_loss(PARAMS, *given, jnp.asarray(asked))
    np.testing.assert_allclose(found, np.mean([losses[i] for i in (1, 2, 4, 5)]), rtol=2e-4)
    assert round_loss(PARAMS, *given, jnp.zeros(9, bool)) == 0
    slopes = jax.grad(round_loss)(PARAMS, *given, jnp.asarray(asked))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


class Task:
    """Prompts whose difficulty is one direction of their embeddings, of little variance among others; policies differ
    by a shift. `measured`: what 8 samples say."""

    def __init__(self, prompts: int = 300, size: int = 12, seed: int = 0) -> None:
        self.random = np.random.default_rng(seed)
        self.embedded = self.random.normal(size=(prompts, size)) * np.array([0.7, *[2.0] * 3, *[0.5] * (size - 4)])
        self.embedded = self.embedded.astype(np.float32)

    def rates(self, shift: float) -> Any:
        return 1 / (1 + np.exp(-(5 * self.embedded[:, 0] + shift)))

    def measured(self, ids: Any, shift: float) -> Any:
        return self.random.binomial(8, self.rates(shift)[ids]) / 8


def by_similarity(queries: Any, keys: Any, labels: Any, width: float) -> Any:
    """What stood here before: attention by cosines."""
    queries, keys = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (queries, keys))
    weight = np.exp(queries @ keys.T / width)
    return weight @ labels / weight.sum(axis=1)


def entropy_of(p: Any, d: Any) -> float:
    return float(np.mean(cross_entropy(jnp.log(p / (1 - p)), jnp.asarray(d))))


@pytest.mark.parametrize("seed", [0, 1])
def test_it_predicts_held_out_prompts_better_than_similarity(seed: int) -> None:
    """Eight rounds of 40 references, each of another policy; then a further policy, and prompts of no round."""
    task, K = Task(seed=seed), 40
    model = predictor_of(12, 0, units=32, layers=2)
    rounds = [task.random.choice(200, K, replace=False) for _ in range(8)]
    shifts = np.linspace(-2, 2, 8)
    rates = np.stack([task.measured(ids, shift) for ids, shift in zip(rounds, shifts, strict=True)])
    ids = np.stack(rounds)
    params = model.learnt(model.start, task.embedded[ids], rates, ids % 5 == 0, 8 * 40)
    references, held_out = task.random.choice(200, K, replace=False), np.arange(200, 300)
    labels, truth = task.measured(references, 1.0), task.rates(1.0)[held_out]
    known = task.embedded[held_out], task.embedded[references], labels
    learnt = entropy_of(np.clip(model.rates(params, *known), 1e-4, 1 - 1e-4), truth)
    untrained = entropy_of(np.clip(model.rates(model.start, *known), 1e-4, 1 - 1e-4), truth)
    widths = [0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
    before = min(entropy_of(np.clip(by_similarity(*known, width), 1e-4, 1 - 1e-4), truth) for width in widths)
    assert learnt < before - 0.1
    assert learnt < untrained - 0.1


def test_it_learns_from_an_earlier_run_before_the_first_step() -> None:
    """Rates under earlier policies in a column: the first references already say which prompts are near the target."""
    task = Task(prompts=120)
    earlier = [task.measured(np.arange(120), shift).tolist() for shift in (-1.0, 0.0, 1.0)]
    histories = [[None if (i + h) % 5 == 0 else earlier[h][i] for h in range(3)] for i in range(120)]
    rows = rows_of(120, policy_embedding=list(task.embedded[:, None]), rates=histories)
    ids, rates = earlier_rounds(prompt_facts(rows, 0), "rates", 40)
    assert ids.shape == rates.shape == (9, 40)
    assert np.isfinite(rates).sum() == 3 * 96
    for one, rate in zip(ids[np.isfinite(rates)], rates[np.isfinite(rates)], strict=True):
        assert rate in histories[one]
    errors = {}
    for column in ("rates", None):
        options = {"units": 24, "layers": 2, "passes": 40, "rates": column}
        curriculum = choose_prompts(*near_predicted(references=40, temperature=0.05, **options))(rows, 0)
        state, off = curriculum.init(), []
        for step in range(2):
            chosen, state = curriculum.select(state, 8)
            if step:
                off.append(np.mean(np.abs(task.rates(0.5)[chosen] - 0.5)))
            given = results(chosen, [8] * len(chosen), lambda i: task.rates(0.5)[i], step)
            if not step:  # so that only what came before the run is learnt from
                before = state["rule1_predictor"]
                state = curriculum.observe(state, given) | {"rule1_predictor": before}
        errors[column] = off[0]
    assert errors["rates"] < 0.75 * errors[None]


@pytest.mark.parametrize("wrong", [[0.5], [[0.5], [0.5, 0.5]], [[2.0], [0.5]], ["a", "b"], [[], []]])
def test_wrong_rates_are_named(wrong: list[Any]) -> None:
    rows = rows_of(2, rates=wrong * (2 if len(wrong) == 1 else 1))
    with pytest.raises(InputError, match=r"the column 'rates' of prompt . is .*, but must be a list of success rates"):
        earlier_rounds(prompt_facts(rows, 0), "rates", 4)


def test_rates_of_nothing_are_an_error() -> None:
    with pytest.raises(InputError, match="the column 'rates' has no success rate of any prompt: leave it out"):
        earlier_rounds(prompt_facts(rows_of(2, rates=[[None], [None]]), 0), "rates", 4)
