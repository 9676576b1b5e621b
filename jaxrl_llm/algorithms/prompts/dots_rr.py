"""Difficulty-targeted Online Data Selection and Rollout Replay (DOTS + RR).

With a prompt's embedding e and references of embeddings e_k and mean rewards d_k, of mean m and standard deviation s:

    w_k = softmax_k(f(e) . g(e_k) / sqrt(h)),    p0 = sum_k w_k d_k
    u, v = c(m, s),    p = sigmoid(logit(clip(p0, 1e-4, 1 - 1e-4)) / clip(softplus(u), 1e-2, 10) + tanh(v))

f and g are networks into R^h of `layers` times LayerNorm, linear and GELU, and a last LayerNorm; c has one layer of 32
units. All learn by the cross-entropy of p and measured rates, each predicted from the other references of its round.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxrl_llm.advantages import group_relative
from jaxrl_llm.algorithms.method import Algorithm, beside, method
from jaxrl_llm.core.annotations import Count, NonNegative, NonNegativeInt, Ours, Paper, Positive, Share, ZeroOrOne
from jaxrl_llm.core.log_ratios import LARGEST
from jaxrl_llm.core.parts import batch_part, chain
from jaxrl_llm.core.source import ONLY_MEASURED
from jaxrl_llm.curriculum import networks as nn
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.embedded import earlier_rounds, embeddings_of, from_embeddings, padded_to
from jaxrl_llm.curriculum.excluded import Why, where
from jaxrl_llm.curriculum.records import Array, PromptFacts, Prompts, State
from jaxrl_llm.curriculum.rules import Machine, Outcome, SuccessModel
from jaxrl_llm.curriculum.scores import near_target
from jaxrl_llm.objectives import clip, importance_correction, policy_gradient, token_mean, token_ratio
from jaxrl_llm.replay.base import times_as_many, whole_groups


@method(paper="arXiv 2506.05316", test="test_replayed.py::test_dots_rr_is_the_loop")
@beside(
    "pretrained",
    "a predictor that is trained before the run, on rates of many prompts under other policies",
    "--algorithm.rates, a column of the data set with the rates of an earlier run",
)
def dots_rr(
    target: Paper[float] = 0.5,
    temperature: Paper[Positive] = 1e-3,
    references: Paper[int] = 256,
    every: Paper[Count] = 2,
    embedding: Ours[str] = "",
    rates: Ours[str] = "",
    units: Paper[int] = 896,
    layers: Paper[int] = 3,
    predictor_rate: Paper[Positive] = 1e-3,
    passes: Paper[int] = 20,
    fresh_share: Paper[Share] = 0.5,
    replay_groups: Paper[NonNegativeInt] = 512,
    clip_low: Paper[NonNegative] = 0.2,
    clip_high: Paper[NonNegative] = 0.2,
    ddof: Ours[ZeroOrOne] = 1,
    epsilon: Ours[NonNegative] = 1e-6,
) -> Algorithm:
    """Difficulty-targeted Online Data Selection and Rollout Replay (DOTS + RR).

    In every `every`-th step the groups of `references` more prompts, drawn uniformly, measure success rates d_k and are
    not trained on. Those of the others are predicted by attention to them, and prompts are drawn without replacement:

        p0 = sum_k softmax_k(f(e_q) . g(e_k) / sqrt(h)) d_k,    p = sigmoid(logit(p0) / s + b)
        P proportional to exp(-|p - target| / temperature)

    From the second step on, groups of the store join the fresh ones, (1 - fresh_share)/fresh_share of their number,
    drawn uniformly and whole; it has the newest replay_groups groups with different rewards. prompts_per_step is the
    number of fresh groups. With mu the policy that sampled the token, r = pi/mu, r0 = pi_old/mu (stop-gradient),

        loss = token mean of max(-A r, -A clip(r, r0 (1 - clip_low), r0 (1 + clip_high)))

    which is r0 times PPO's clipped loss in pi/pi_old. A = (reward - mean_g)/(std_g + epsilon) (ddof) is what it was
    when the group was fresh, and then r0 = 1.

    e is the mean of the last hidden states of the run's initial policy over the prompt, less its mean over all prompts
    (ours), or the column `embedding` of the data set. f and g are networks of `layers` layers of h = `units` units; s
    and b are made by a third from the mean and deviation of d (the module's first lines). The three learn by the
    cross-entropy with the measured d, each predicted from the others of its round, in `passes` passes over the last
    8 rounds at a time, with Adam of step size predictor_rate, of which the one counts after which a fifth of the
    prompts, which are not learnt from, are predicted best. The paper trains them before the run, on rates that it
    measures for that; here the run's own do, and before it those in the column `rates`: lists of the rates under
    earlier policies, such as of an earlier run. The paper measures the references before it draws the same step's
    prompts; here they are sampled beside these, and serve the draws after that step.
    """
    predictor = attention(references, every, units, layers, predictor_rate, passes, embedding or None, rates or None)
    prompts = choose_prompts(reference_groups(references, every), near_target(target, temperature, predictor))
    weighted = importance_correction("token", "truncate", high=math.exp(LARGEST))  # never truncated
    objective = policy_gradient(token_ratio("old"), clip(clip_low, clip_high), token_mean())
    return Algorithm(
        chain(group_relative(ddof=ddof, epsilon=epsilon), weighted), objective,
        curriculum=prompts if embedding else from_embeddings(prompts),
        replay=whole_groups(**times_as_many((1 - fresh_share) / fresh_share), groups=replay_groups),
    )  # fmt: skip


EDGE = 1e-4
ROUNDS = 8  # of references, from which the predictor learns
CALIBRATION = 32  # units


def start_predictor(key: jax.Array, size: int, units: int, layers: int) -> dict[str, Any]:
    """The parameters of `predicted_logits` for embeddings of `size` numbers; at first p is p0."""
    query, key_of, first = jax.random.split(key, 3)
    last = {"weight": jnp.zeros((CALIBRATION, 2)), "bias": jnp.array([np.log(np.e - 1), 0.0], jnp.float32)}
    return {
        "query": nn.start_mlp(query, size, units, layers),
        "key": nn.start_mlp(key_of, size, units, layers),
        "calibration": [nn.start_linear(first, 2, CALIBRATION), last],
    }


def predicted_logits(
    params: dict[str, Any], queries: jax.Array, keys: jax.Array, labels: jax.Array, known: jax.Array
) -> jax.Array:
    """f32[n]: logits of the predicted success rates of prompts with embeddings `queries` f32[n, D], see above.

    keys f32[K, D], labels f32[K]: embeddings and mean rewards of the references. known: bool[n, K] or [1, K], those
    that a prompt is predicted from.
    """
    f, g = nn.mlp(params["query"], queries), nn.mlp(params["key"], keys)
    p0 = jnp.clip(nn.attended(f, g, labels[:, None], known)[:, 0], EDGE, 1 - EDGE)
    count = jnp.maximum(jnp.sum(known, axis=1), 1)
    mean = jnp.sum(jnp.where(known, labels, 0.0), axis=1) / count
    variance = jnp.sum(jnp.where(known, (labels - mean[:, None]) ** 2, 0.0), axis=1) / count
    facts = jnp.stack([mean, jnp.sqrt(variance + 1e-12)], axis=1)  # which has a slope at 0
    first, last = params["calibration"]
    u, v = jnp.moveaxis(nn.linear(last, jax.nn.gelu(nn.linear(first, facts))), -1, 0)
    return (jnp.log(p0) - jnp.log1p(-p0)) / jnp.clip(jax.nn.softplus(u), 1e-2, 10.0) + jnp.tanh(v)


def round_loss(params: dict[str, Any], embedded: jax.Array, rates: jax.Array, asked: jax.Array) -> jax.Array:
    """The mean cross-entropy of the rates f32[K] of a round (NaN: none) that are asked for, bool[K], each predicted
    from the others of the round; 0 where none is."""
    there, labels = ~jnp.isnan(rates), jnp.nan_to_num(rates)
    known = there[None, :] & ~jnp.eye(len(rates), dtype=bool)
    each = optax.sigmoid_binary_cross_entropy(predicted_logits(params, embedded, embedded, labels, known), labels)
    asked = asked & there
    return jnp.sum(jnp.where(asked, each, 0.0)) / jnp.maximum(jnp.sum(asked), 1)


_FIRST = 1e12  # a score above those of all others


def references_of(facts: PromptFacts, references: int, every: int) -> Callable[[int], Array]:
    """The function of a step that gives its references int64[K], drawn uniformly; none but in every `every`-th step.

    There are at most half as many as prompts.
    """
    K = min(references, facts.size // 2)

    def chosen(step: int) -> Array:
        if not K or step % every:
            return np.zeros(0, np.int64)
        return facts.order[np.random.default_rng([facts.seed, 3, step]).choice(facts.size, K, replace=False)]

    return chosen


@batch_part
def reference_groups(facts: PromptFacts, references: Count = 256, every: Count = 2) -> Machine:
    """In every `every`-th step, from the first on, sample `references` more prompts, see `references_of`.

    Their groups measure difficulties and are not trained on. Until the next such step no other prompt is drawn twice.
    """

    chosen = references_of(facts, references, every)

    def asked(state: State, ids: Array) -> Array:
        return np.isin(ids, chosen(state["step"]))

    def observe(state: State, outcome: Outcome) -> State:
        ids, step = outcome.results.ids, state["step"] + 1
        others = ids[~asked(state, ids)].astype(np.int32)
        drawn = np.zeros(0, np.int32) if step % every == 0 else np.concatenate([state["drawn"], others])
        return {"step": step, "drawn": drawn}

    return Machine(
        {"step": 0, "drawn": np.zeros(0, np.int32)},
        score=lambda state, prompts, random: np.where(asked(state, prompts.ids), _FIRST, 0.0),
        excluded=lambda state, prompts: where(
            Why.RECENT, np.isin(prompts.ids, state["drawn"]) & ~asked(state, prompts.ids)
        ),
        size=lambda state, count: count + len(chosen(state["step"])),
        observe=observe,
        reasons=(Why.RECENT,),
        columns=lambda state, ids: [{ONLY_MEASURED: bool(one)} for one in asked(state, ids)],
    )


class Predictor(NamedTuple):
    """The functions of a predictor whose parameters are f32[1, n], as a curriculum's state has them."""

    start: Array
    learnt: Callable[[Array, Array, Array, Array, int], Array]
    """(parameters, embeddings f32[R, K, D], rates f64[R, K], bool[R, K] which of them are held out, steps) ->
    parameters after at most so many, a round each."""
    rates: Callable[[Array, Array, Array, Array], Array]
    """(parameters, embeddings f32[n, D] of prompts and [K, D] of references, rates f64[K]) -> f64[n]."""


def predictor_of(size: int, seed: int, units: int = 896, layers: int = 3, rate: float = 1e-3) -> Predictor:
    """The predictor of embeddings of `size` numbers, its parameters at first, and how it learns with Adam's `rate`."""
    first, whole = nn.flattened(start_predictor(jax.random.key(seed), size, units, layers))

    def loss(vector: jax.Array, number: jax.Array, embedded: jax.Array, rates: jax.Array, held: jax.Array) -> jax.Array:
        one = number % len(rates)
        return round_loss(whole(vector), embedded[one], rates[one], ~held[one])

    def check(vector: jax.Array, embedded: jax.Array, rates: jax.Array, held: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.map(lambda one: round_loss(whole(vector), *one), (embedded, rates, held)))

    @jax.jit
    def forward(vector: jax.Array, queries: jax.Array, keys: jax.Array, rates: jax.Array) -> jax.Array:
        known = ~jnp.isnan(rates)[None, :]
        return jax.nn.sigmoid(predicted_logits(whole(vector), queries, keys, jnp.nan_to_num(rates), known))

    def learnt(params: Array, embedded: Array, rates: Array, held: Array, steps: int) -> Array:
        return nn.fitted(loss, check, params, steps, rate, len(rates), embedded, rates.astype(np.float32), held)

    def found(params: Array, queries: Array, keys: Array, rates: Array) -> Array:
        return nn.in_chunks(lambda some: forward(params[0], some, keys, rates.astype(np.float32)), queries)

    return Predictor(first, learnt, found)


@batch_part
def attention(
    facts: PromptFacts, references: Count = 256, every: Count = 2, units: Count = 896, layers: Count = 3,
    rate: Positive = 1e-3, passes: Count = 20, column: str | None = None, rates: str | None = None,
) -> SuccessModel:  # fmt: skip
    """Success rates predicted from the last references, which `reference_groups` samples, by networks that learn.

    Before the first ones it is 1/2. column: of the data set, with the embedding of each prompt, a list of numbers;
    None: those that the run computes (`curriculum.embedded`). rates: a column with the prompts' rates under earlier
    policies, from which the networks learn before the run; None: they start at random. The metric
    curriculum/prediction_error is the mean squared error on the last references, before these were learnt from.
    """

    chosen = references_of(facts, references, every)
    rank = facts.rank
    table = embeddings_of(facts, column).mean(axis=1)
    model = predictor_of(table.shape[1], facts.seed, units, layers, rate)
    K = references
    held = nn.is_held_out(facts)

    def predicted(state: State, prompts: Prompts, random: np.random.Generator) -> Array:
        if not (state["ids"][-1] >= 0).any():
            return np.full(len(prompts.ids), 0.5)
        return of_last(state, prompts.ids)

    def of_last(state: State, ids: Array) -> Array:
        return model.rates(state["predictor"], table[ids], table[state["ids"][-1]], state["rates"][-1])

    def observe(state: State, outcome: Outcome) -> State:
        results = outcome.results
        new = np.isin(results.ids, chosen(outcome.before.step))
        if not new.any():
            return {}
        order = np.argsort(rank[results.ids[new]])
        ids, measured = results.ids[new][order], results.mean[new][order]
        after: State = {}
        if (state["ids"][-1] >= 0).any():
            after["error"] = float(np.mean((of_last(state, ids) - measured) ** 2))
        after["ids"] = np.concatenate([state["ids"][1:], padded_to(ids, K, -1, np.int32)[None]])
        after["rates"] = np.concatenate([state["rates"][1:], padded_to(measured, K, np.nan, np.float64)[None]])
        there = int((after["ids"][:, 0] >= 0).sum())
        # The rounds that there are, over and over, so that one program serves any number of them.
        order = np.resize(np.arange(ROUNDS - there, ROUNDS), ROUNDS)
        known = after["ids"][order]
        now = table[known], after["rates"][order], held[known]
        after["predictor"] = model.learnt(state["predictor"], *now, passes * there)
        return after

    start: State = {"ids": np.full((ROUNDS, K), -1, np.int32), "rates": np.full((ROUNDS, K), np.nan), "error": 0.0}
    start["predictor"] = model.start
    if rates is not None:
        earlier, measured = earlier_rounds(facts, rates, K)
        known = table[earlier], measured, held[earlier]
        start["predictor"] = model.learnt(model.start, *known, passes * len(measured))
    return SuccessModel(predicted, start, observe, lambda state: {"prediction_error": state["error"]})
