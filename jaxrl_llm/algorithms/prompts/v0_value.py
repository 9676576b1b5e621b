"""V_0: A Generalist Value Model for Any Policy at State Zero.

A prompt has S embeddings t_s (`curriculum.embedded`), of as many parts of it. K queries, learned ones and a correction
that a network makes of the mean of the t_s (0 at first), attend to their projections to d numbers, with a few heads,
and e(x) is what they find, K d numbers. The prompts of the context, each W e(x_j) and a vector of its label z_j, attend
to each other in layers, and a new prompt, W e(x), to what the context is in each layer:

    p(x) = sigmoid(w . a(x) + b),    a(x) what the last layer makes of it

The context is a set: its order changes nothing, and new prompts do not see each other.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import Code, Count, NonNegative, Ours, Positive
from jaxrl_llm.core.parts import part
from jaxrl_llm.curriculum import networks as nn
from jaxrl_llm.curriculum.budgets import by_mixed, by_variance, divide
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.embedded import earlier_rounds, embeddings_of, from_embeddings, padded_to
from jaxrl_llm.curriculum.records import Array, PromptFacts, State
from jaxrl_llm.curriculum.rules import ModelOf, Outcome, SuccessModel
from jaxrl_llm.curriculum.scores import least_tried
from jaxrl_llm.utils.errors import InputError


@method(paper="arXiv 2602.03584", test="test_v0_value.py::test_the_value_model_is_the_loop")
@beside(
    "generalist",
    "weights that learned from the histories of many other policies, with TabPFN's as the last part",
    "--algorithm.rates, a column of the data set with the success rates under earlier policies",
)
@beside("ensemble", "the mean of four members", "nothing yet")
@beside("backbone", "embeddings that learn with the model", "nothing yet: the initial policy's are as they are")
def v0_value(
    allocation: Ours[Literal["variance", "target"]] = "variance",
    context: Ours[int] = 256,
    rates: Ours[str] = "",
    embedding: Ours[str] = "",
    pieces: Ours[Count] = 8,
    queries: Code[int] = 168,
    query_size: Code[int] = 6,
    heads: Code[int] = 3,
    bottleneck: Code[int] = 128,
    width: Ours[int] = 64,
    layers: Ours[int] = 2,
    value_rate: Ours[Positive] = 1e-3,
    value_steps: Ours[int] = 32,
    pretraining_steps: Ours[int] = 1000,
    threshold: Code[float] = 0.5,
    mixed_target: Ours[float] = 0.9,
    least_samples: Ours[int] = 2,
    most_samples: Ours[int] = 32,
    clip_low: Ours[NonNegative] = 0.2,
    clip_high: Ours[NonNegative] = 0.2,
    kl_coefficient: Ours[NonNegative] = 0.0,
) -> Algorithm:
    """V_0: A Generalist Value Model for Any Policy at State Zero.

    Predicts the policy's success rate p on a prompt before it is sampled, from the outcomes of the last `context`
    prompts, and divides a step's samples by it. The labels are 1 where the mean reward was at least `threshold`.

        p(x) = V(x | C),    C = {(x_j, z_j)},    loss = -(z log p + (1 - z) log(1 - p))

    V is a network that reads the context: `queries` queries of query_size numbers attend with `heads` heads to `pieces`
    embeddings of a prompt, after a correction by a network with `bottleneck` units, and `layers` layers of attention of
    `width` numbers go between the prompts (the module's first lines). The embeddings are the run's initial policy's,
    less their mean over all prompts, or those in the column `embedding`.

    V learns on the run's own outcomes, value_steps steps of Adam of size value_rate after each step. In each of them a
    random part of the context is predicted from the others, and the one counts after which a fifth of the prompts,
    which are not learnt from, are predicted best. Before the run it learns on the rates in the column `rates`: lists of
    the rates under earlier policies, such as of an earlier run, in pretraining_steps steps.

    allocation "variance" gives samples in proportion to p (1 - p); "target" the smallest group that has right and wrong
    samples with probability mixed_target. Each prompt gets from least_samples to most_samples, and all of them the
    step's total. Credit and loss are GRPO's (clip_low, clip_high, kl_coefficient). The paper's rule for the allocation
    was not available: both rules are ours.
    """
    budget = by_variance if allocation == "variance" else by_mixed(mixed_target)
    model = from_outcomes(
        context, threshold, queries, query_size, heads, bottleneck, width, layers, value_rate, value_steps,
        pretraining_steps, embedding or None, rates or None,
    )  # fmt: skip
    prompts = choose_prompts(least_tried(), divide(budget, model, least=least_samples, most=most_samples))
    curriculum = prompts if embedding else from_embeddings(prompts, pieces)
    return replace(grpo(clip_low, clip_high, kl_coefficient), curriculum=curriculum)


CHECKED = 8  # steps between two checks with held-out prompts, at least


class Sizes(NamedTuple):
    """Of a value model, see `v0_value`."""

    queries: int = 168
    query_size: int = 6
    heads: int = 3
    bottleneck: int = 128
    width: int = 64
    layers: int = 2


def start_values(key: jax.Array, inputs: int, sizes: Sizes) -> dict[str, Any]:
    """The parameters of `value_logits` for embeddings of `inputs` numbers; at first p is 1/2."""
    K, d, H = sizes.queries, sizes.query_size, sizes.width
    names = ("queries", "tokens", "keys", "values", "down", "embed", "labels", *range(sizes.layers))
    keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))

    def layer(key: jax.Array) -> dict[str, Any]:
        of = jax.random.split(key, 6)
        whole = {name: nn.start_linear(one, H, H) for name, one in zip(("q", "k", "v", "o"), of[:4], strict=True)}
        mlp = {"up": nn.start_linear(of[4], H, 2 * H), "down": nn.start_linear(of[5], 2 * H, H)}
        return {**whole, **mlp, "norm": nn.start_norm(H), "mlp_norm": nn.start_norm(H)}

    return {
        "norm": nn.start_norm(inputs),
        "queries": jax.random.normal(keys["queries"], (K, d)),
        "tokens": nn.start_linear(keys["tokens"], inputs, d),
        "keys": nn.start_linear(keys["keys"], d, d),
        "values": nn.start_linear(keys["values"], d, d),
        "down": nn.start_linear(keys["down"], inputs, sizes.bottleneck),
        "up": {"weight": jnp.zeros((sizes.bottleneck, K * d)), "bias": jnp.zeros(K * d)},
        "embed": nn.start_linear(keys["embed"], K * d, H),
        "labels": jax.random.normal(keys["labels"], (2, H)),
        "layers": [layer(keys[number]) for number in range(sizes.layers)],
        "last_norm": nn.start_norm(H),
        "last": {"weight": jnp.zeros((H, 1)), "bias": jnp.zeros(1)},
    }


def embedded(params: dict[str, Any], x: jax.Array, heads: int) -> jax.Array:
    """e(x) f32[n, K d] of prompts with embeddings x f32[n, S, D]."""
    t, (K, d) = nn.layer_norm(params["norm"], x), params["queries"].shape
    token = nn.linear(params["tokens"], t)
    more = nn.linear(params["up"], jax.nn.gelu(nn.linear(params["down"], jnp.mean(t, axis=1))))
    query = params["queries"] + more.reshape(-1, K, d)
    key, value = nn.linear(params["keys"], token), nn.linear(params["values"], token)
    return _by_heads(query, key, value, jnp.array(True), heads).reshape(len(x), -1)


def _by_heads(q: jax.Array, k: jax.Array, v: jax.Array, known: jax.Array, heads: int) -> jax.Array:
    """`attended` in each head: [..., n, d] to [..., K, d], of which each head has d / heads numbers."""
    q, k, v = (jnp.stack(jnp.split(one, heads, axis=-1)) for one in (q, k, v))
    return jnp.concatenate(list(nn.attended(q, k, v, known)), axis=-1)


def value_logits(
    params: dict[str, Any], queries: jax.Array, context: jax.Array, labels: jax.Array, known: jax.Array, heads: int = 3
) -> jax.Array:
    """f32[n]: logits of V(x | C) of prompts with embeddings queries f32[n, S, D].

    context f32[C, S, D], labels int[C] 0 or 1, known bool[C]: which prompts of the context there are.
    """
    support = nn.linear(params["embed"], embedded(params, context, heads)) + params["labels"][labels]
    x = nn.linear(params["embed"], embedded(params, queries, heads))
    mask = known[None, :]
    for layer in params["layers"]:
        seen = nn.layer_norm(layer["norm"], support)
        key, value = nn.linear(layer["k"], seen), nn.linear(layer["v"], seen)

        def through(y: jax.Array, layer: Any = layer, key: jax.Array = key, value: jax.Array = value) -> jax.Array:
            q = nn.linear(layer["q"], nn.layer_norm(layer["norm"], y))
            y = y + nn.linear(layer["o"], _by_heads(q, key, value, mask, 4))
            up = jax.nn.gelu(nn.linear(layer["up"], nn.layer_norm(layer["mlp_norm"], y)))
            return y + nn.linear(layer["down"], up)

        support, x = through(support), through(x)
    return nn.linear(params["last"], nn.layer_norm(params["last_norm"], x))[:, 0]


class ValueModel(NamedTuple):
    """The functions of a value model whose parameters are f32[1, n], as a curriculum's state has them."""

    start: Array
    learnt: Callable[[Array, Array, Array, Array, int, int], Array]
    """(parameters, embeddings f32[H, C, S, D], labels f64[H, C] with NaN where there is none, bool[H, C] which are held
    out, steps, seed) -> parameters after at most so many steps, in each of which a random part of one of the H is
    predicted from the others."""
    values: Callable[[Array, Array, Array, Array], Array]
    """(parameters, embeddings f32[n, S, D], those of the context [C, S, D], labels f64[C] or NaN) -> f64[n]."""


def value_model(size: int, seed: int, sizes: Sizes = Sizes(), rate: float = 1e-3) -> ValueModel:  # noqa: B008
    """The value model of embeddings of `size` numbers, its parameters at first, and how it learns."""
    first, whole = nn.flattened(start_values(jax.random.key(seed), size, sizes))

    def asked_loss(vector: jax.Array, x: jax.Array, z: jax.Array, context: jax.Array, asked: jax.Array) -> jax.Array:
        logits = value_logits(whole(vector), x, x, z.astype(jnp.int32), context, sizes.heads)
        each = optax.sigmoid_binary_cross_entropy(logits, z)
        return jnp.sum(jnp.where(asked, each, 0.0)) / jnp.maximum(jnp.sum(asked), 1)

    def loss(
        vector: jax.Array, number: jax.Array, x: jax.Array, labels: jax.Array, held: jax.Array, seed: jax.Array
    ) -> jax.Array:
        of, share, draw = jax.random.split(jax.random.fold_in(jax.random.key(seed), number), 3)
        one = jax.random.randint(of, (), 0, len(x))
        z, there = jnp.nan_to_num(labels[one]), ~jnp.isnan(labels[one])
        context = there & (jax.random.uniform(draw, z.shape) < jax.random.uniform(share, (), minval=0.2, maxval=0.9))
        return asked_loss(vector, x[one], z, context, there & ~context & ~held[one])

    def check(vector: jax.Array, x: jax.Array, labels: jax.Array, held: jax.Array, seed: jax.Array) -> jax.Array:
        def of(one: Any) -> jax.Array:
            x, labels, held = one
            there = ~jnp.isnan(labels)
            return asked_loss(vector, x, jnp.nan_to_num(labels), there & ~held, there & held)

        return jnp.mean(jax.lax.map(of, (x, labels, held)))

    @jax.jit
    def forward(vector: jax.Array, queries: jax.Array, context: jax.Array, labels: jax.Array) -> jax.Array:
        z = jnp.nan_to_num(labels).astype(jnp.int32)
        return jax.nn.sigmoid(value_logits(whole(vector), queries, context, z, ~jnp.isnan(labels), sizes.heads))

    def learnt(params: Array, x: Array, labels: Array, held: Array, steps: int, seed: int) -> Array:
        every = max(CHECKED, len(labels))
        return nn.fitted(loss, check, params, steps, rate, every, x, labels.astype(np.float32), held, np.uint32(seed))

    def values(params: Array, queries: Array, context: Array, labels: Array) -> Array:
        return nn.in_chunks(lambda some: forward(params[0], some, context, labels.astype(np.float32)), queries)

    return ValueModel(first, learnt, values)


@part
def from_outcomes(
    context: Count = 256, threshold: float = 0.5, queries: Count = 168, query_size: Count = 6, heads: Count = 3,
    bottleneck: Count = 128, width: Count = 64, layers: Count = 2, rate: Positive = 1e-3, steps: Count = 32,
    pretraining: Count = 1000, column: str | None = None, rates: str | None = None,
) -> ModelOf:  # fmt: skip
    """Success rates predicted from the outcomes of the last `context` prompts by a network that learns, see `v0_value`.

    column: with the embeddings; None: the run's. rates: with rates under earlier policies, from which the network
    learns first, in `pretraining` steps; None: it starts with p = 1/2. The metric curriculum/prediction_error is the
    last step's mean squared error, before it was learnt from. InputError for sizes that heads do not divide.
    """
    if query_size % heads or width % 4:
        raise InputError(
            f"the value model's query_size {query_size} must be a multiple of heads {heads}, and width {width} of 4"
        )

    def make(facts: PromptFacts) -> SuccessModel:
        rank, held = facts.rank, nn.is_held_out(facts)
        table = embeddings_of(facts, column)
        sizes = Sizes(queries, query_size, heads, bottleneck, width, layers)
        model = value_model(table.shape[2], facts.seed, sizes, rate)

        def predict(state: State, ids: Array) -> Array:
            of = padded_to(state["recent"], context, 0, np.int64)
            return model.values(state["network"], table[ids], table[of], known_labels(state["labels"]))

        def known_labels(labels: Array) -> Array:
            return padded_to(labels, context, np.nan, np.float64)

        def observe(state: State, outcome: Outcome) -> State:
            ids, mean = outcome.results.ids, outcome.results.mean
            labels = (mean >= threshold).astype(np.float64)
            known, new = ~np.isin(state["recent"], ids), np.argsort(rank[ids])
            after: State = {"error": float(np.mean((predict(state, ids) - labels) ** 2)) if len(ids) else 0.0}
            after["recent"] = np.concatenate([state["recent"][known], ids[new].astype(np.int32)])[-context:]
            after["labels"] = np.concatenate([state["labels"][known], labels[new]])[-context:]
            of = padded_to(after["recent"], context, 0, np.int64)[None]
            seed, z = facts.seed + 1 + outcome.before.step, known_labels(after["labels"])[None]
            after["network"] = model.learnt(state["network"], table[of], z, held[of], steps, seed)
            return after

        start = {"recent": np.zeros(0, np.int32), "labels": np.zeros(0), "error": 0.0, "network": model.start}
        if rates is not None:
            earlier, measured = earlier_rounds(facts, rates, context)
            z = np.where(np.isnan(measured), np.nan, measured >= threshold)
            start["network"] = model.learnt(model.start, table[earlier], z, held[earlier], pretraining, facts.seed)
        return SuccessModel(
            lambda state, prompts, random: predict(state, prompts.ids), start, observe,
            lambda state: {"prediction_error": state["error"]},
        )  # fmt: skip

    return make
