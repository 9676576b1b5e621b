"""V_0's value model: by a slow loop, the set that its context is, and held-out outcomes against a kernel average."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from optax import sigmoid_binary_cross_entropy as cross_entropy

from jaxrl_llm.algorithms.prompts.v0_value import (
    Sizes,
    from_outcomes,
    start_values,
    v0_value,
    value_logits,
    value_model,
)
from jaxrl_llm.core.repr import code
from jaxrl_llm.curriculum.embedded import FromEmbeddings
from jaxrl_llm.curriculum.records import prompt_facts
from jaxrl_llm.utils.errors import InputError

SIZES = Sizes(queries=3, query_size=4, heads=2, bottleneck=5, width=8, layers=2)


def moved(tree: Any) -> Any:
    leaves, shape = jax.tree.flatten(tree)
    random = np.random.default_rng(0)
    return jax.tree.unflatten(shape, [np.asarray(x) + 0.3 * random.normal(size=x.shape) for x in leaves])


def lin(layer: Any, x: Any) -> Any:
    return [
        layer["bias"][j] + sum(x[i] * layer["weight"][i, j] for i in range(len(x))) for j in range(len(layer["bias"]))
    ]


def norm(layer: Any, x: Any) -> Any:
    mean = sum(x) / len(x)
    variance = sum((one - mean) ** 2 for one in x) / len(x)
    return [layer["gain"][i] * (x[i] - mean) / math.sqrt(variance + 1e-5) + layer["shift"][i] for i in range(len(x))]


def gelu(x: Any) -> Any:
    return [0.5 * one * (1 + math.tanh(math.sqrt(2 / math.pi) * (one + 0.044715 * one**3))) for one in x]


def attend(query: Any, keys: Any, values: Any, heads: int) -> Any:
    """One query to all keys, in each head; 0 without keys."""
    size, out = len(query) // heads, []
    for h in range(heads):
        own = slice(h * size, (h + 1) * size)
        weights = [
            math.exp(sum(a * b for a, b in zip(query[own], key[own], strict=True)) / math.sqrt(size)) for key in keys
        ]
        for j in range(h * size, (h + 1) * size):
            total = sum(weights)
            out.append(sum(w * v[j] for w, v in zip(weights, values, strict=True)) / total if keys else 0.0)
    return out


def embedding(params: Any, pieces: Any) -> Any:
    tokens = [norm(params["norm"], piece) for piece in pieces]
    pooled = [sum(token[i] for token in tokens) / len(tokens) for i in range(len(tokens[0]))]
    more = lin(params["up"], gelu(lin(params["down"], pooled)))
    small = [lin(params["tokens"], token) for token in tokens]
    keys, values = ([lin(params[name], one) for one in small] for name in ("keys", "values"))
    out = []
    for k in range(SIZES.queries):
        query = [params["queries"][k][j] + more[k * SIZES.query_size + j] for j in range(SIZES.query_size)]
        out += attend(query, keys, values, SIZES.heads)
    return out


def by_loop(params: Any, query: Any, context: Any, labels: Any) -> float:
    def token(pieces: Any, label: int | None) -> Any:
        x = lin(params["embed"], embedding(params, pieces))
        return x if label is None else [a + b for a, b in zip(x, params["labels"][label], strict=True)]

    support, x = [token(one, z) for one, z in zip(context, labels, strict=True)], token(query, None)
    for layer in params["layers"]:
        seen = [norm(layer["norm"], one) for one in support]
        keys, values = [lin(layer["k"], one) for one in seen], [lin(layer["v"], one) for one in seen]

        def through(y: Any, layer: Any = layer, keys: Any = keys, values: Any = values) -> Any:
            found = lin(layer["o"], attend(lin(layer["q"], norm(layer["norm"], y)), keys, values, 4))
            y = [a + b for a, b in zip(y, found, strict=True)]
            found = lin(layer["down"], gelu(lin(layer["up"], norm(layer["mlp_norm"], y))))
            return [a + b for a, b in zip(y, found, strict=True)]

        support, x = [through(one) for one in support], through(x)
    return float(lin(params["last"], norm(params["last_norm"], x))[0])


def test_the_value_model_is_the_loop() -> None:
    params = moved(start_values(jax.random.key(1), 6, SIZES))
    random = np.random.default_rng(2)
    queries, context = random.normal(size=(3, 2, 6)), random.normal(size=(5, 2, 6))
    labels, known = np.array([1, 0, 0, 1, 1]), np.array([True, True, False, True, False])
    found = value_logits(params, queries, context, labels, known, SIZES.heads)
    expected = [by_loop(params, one, context[known], labels[known]) for one in queries]
    np.testing.assert_allclose(found, expected, rtol=2e-4, atol=2e-5)
    alone = value_logits(params, queries, context, labels, np.zeros(5, bool), SIZES.heads)
    np.testing.assert_allclose(alone, [by_loop(params, one, [], []) for one in queries], rtol=2e-4, atol=2e-5)


def test_the_context_is_a_set() -> None:
    """Its order changes nothing, its labels do, and queries do not see each other."""
    params = moved(start_values(jax.random.key(1), 6, SIZES))
    random = np.random.default_rng(3)
    queries, context, labels = random.normal(size=(4, 2, 6)), random.normal(size=(6, 2, 6)), random.integers(0, 2, 6)
    known, order = np.ones(6, bool), random.permutation(6)
    found = value_logits(params, queries, context, labels, known, SIZES.heads)
    again = value_logits(params, queries, context[order], labels[order], known, SIZES.heads)
    np.testing.assert_allclose(again, found, rtol=1e-4, atol=1e-5)
    one = value_logits(params, queries[2:3], context, labels, known, SIZES.heads)
    np.testing.assert_allclose(one, found[2:3], rtol=1e-4, atol=1e-5)
    other = value_logits(params, queries, context, 1 - labels, known, SIZES.heads)
    assert np.abs(np.asarray(other - found)).max() > 0.01


def test_at_the_start_it_is_a_half_and_the_correction_of_queries_is_0() -> None:
    start = start_values(jax.random.key(0), 6, SIZES)
    random = np.random.default_rng(0)
    given = random.normal(size=(2, 2, 6)), random.normal(size=(3, 2, 6)), np.array([1, 1, 0]), np.ones(3, bool)
    np.testing.assert_array_equal(value_logits(start, *given, SIZES.heads), [0.0, 0.0])
    assert not np.asarray(start["up"]["weight"]).any()


def kernel_average(queries: Any, context: Any, labels: Any, width: float) -> Any:
    """What stood here before: labels averaged by cosines, with a prior of 1/2."""
    queries, context = (x / np.linalg.norm(x, axis=1, keepdims=True) for x in (queries, context))
    near = np.exp((queries @ context.T - 1) / width)
    return (0.5 + near @ labels) / (1 + near.sum(axis=1))


def test_it_predicts_policies_and_prompts_that_it_has_not_seen() -> None:
    """Policies differ in which of two skills they have, which only the context tells; prompts need one or the other.
    The held-out policies and prompts are of neither's training."""
    random = np.random.default_rng(0)
    P, C = 240, 48
    skill = random.integers(0, 2, P)
    x = random.normal(size=(P, 2, 8)) * np.array([0.3, *[1.0] * 7])
    x[:, :, 0] += np.where(skill, 1.0, -1.0)[:, None] * 0.8
    x = x.astype(np.float32)

    def outcomes(has: Any, ids: Any) -> Any:
        return (random.random(len(ids)) < np.where(np.take(has, skill[ids]), 0.9, 0.1)).astype(float)

    histories = [random.choice(180, C, replace=False) for _ in range(24)]
    kinds = [((1, 0), (0, 1), (1, 1), (0, 0))[h % 4] for h in range(24)]
    ids, labels = np.stack(histories), np.stack([outcomes(has, of) for has, of in zip(kinds, histories, strict=True)])
    sizes = Sizes(queries=4, query_size=6, heads=3, bottleneck=8, width=16, layers=1)
    model = value_model(8, 0, sizes, 0.01)
    params = model.learnt(model.start, x[ids], labels, ids % 5 == 0, 600, 0)
    learnt, before, held_out = [], [], np.arange(180, 240)
    for has in ((1, 0), (0, 1)):
        context = random.choice(180, C, replace=False)
        known, truth = outcomes(has, context), np.where(np.take(has, skill[held_out]), 0.9, 0.1)
        p = np.clip(model.values(params, x[held_out], x[context], known), 1e-4, 1 - 1e-4)
        learnt.append(float(np.mean(cross_entropy(jnp.log(p / (1 - p)), truth))))
        flat = x.mean(axis=1)
        other = [kernel_average(flat[held_out], flat[context], known, w) for w in (0.02, 0.05, 0.1, 0.2, 0.5)]
        before.append(min(float(np.mean(cross_entropy(jnp.log(q / (1 - q)), truth))) for q in other))
    assert np.mean(learnt) < np.mean(before) - 0.05
    assert np.mean(learnt) < 0.55


def test_it_learns_from_the_column_of_an_earlier_run() -> None:
    """Before the first step the network already tells prompts apart."""
    random = np.random.default_rng(0)
    kind = np.arange(60) % 2
    x = random.normal(size=(60, 1, 4)).astype(np.float32)
    x[:, 0, 0] += np.where(kind, 2.0, -2.0)
    rates = [[float(random.binomial(4, 0.9 if k else 0.1)) / 4, None if i % 7 else 1.0 * k] for i, k in enumerate(kind)]
    rows = [{"prompt": str(i), "policy_embedding": x[i], "before": rates[i]} for i in range(60)]
    options: dict[str, Any] = {
        "context": 30, "queries": 2, "query_size": 4, "heads": 2, "bottleneck": 4, "width": 8, "layers": 1,
        "rate": 0.02, "pretraining": 200,
    }  # fmt: skip
    for column in ("before", None):
        model = from_outcomes(**options, rates=column)(prompt_facts(rows, 0))
        prompts: Any = type("Prompts", (), {"ids": np.arange(60)})
        p = model.predict(dict(model.start), prompts, random)
        if column is None:
            np.testing.assert_array_equal(p, 0.5)
        else:
            assert p[kind == 1].mean() > p[kind == 0].mean() + 0.3


def test_its_curriculum_is_of_embeddings_unless_a_column_has_them() -> None:
    own, given = v0_value(pieces=3).curriculum, v0_value(embedding="vector").curriculum
    assert isinstance(own, FromEmbeddings)
    assert own.pieces == 3
    assert code(own).startswith("from_embeddings(choose_prompts(")
    assert not isinstance(given, FromEmbeddings)
    with pytest.raises(InputError, match="query_size 6 must be a multiple of heads 4"):
        v0_value(heads=4)
