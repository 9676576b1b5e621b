"""Difficulty-targeted Online Data Selection and Rollout Replay (DOTS + RR).

With a prompt's embedding e and references of embeddings e_k and mean rewards d_k, of mean m and standard deviation s:

    w_k = softmax_k(e . e_k / width),    p0 = sum_k w_k d_k
    p = sigmoid(logit(clip(p0, 1e-4, 1 - 1e-4)) / clip(softplus(u), 1e-2, 10) + tanh(v))

u = u_0 + u_1 m + u_2 s, and v alike. The paper has small networks in place of the embeddings' product and of u and v,
trained before the run. Here width, u and v are 7 numbers that the run itself learns, by the same cross-entropy, from
references of one round predicted from those of the round before.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated

import numpy as np

from jaxrl_llm.advantages.group import group_relative
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.arguments.hyperparameters import OURS, PAPER
from jaxrl_llm.core.arguments.ranges import Count, NonNegative, NonNegativeInt, Positive, Share, ZeroOrOne
from jaxrl_llm.core.log_ratios import LARGEST
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.source import ONLY_MEASURED
from jaxrl_llm.core.transform import chain
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.excluded import Why, where
from jaxrl_llm.curriculum.neighbours import word_features
from jaxrl_llm.curriculum.records import Array, PromptFacts, Prompts, State
from jaxrl_llm.curriculum.rules import Machine, Outcome, RuleOf
from jaxrl_llm.curriculum.scores import near_target
from jaxrl_llm.curriculum.success_models import ModelOf, SuccessModel
from jaxrl_llm.objectives import clip, policy_gradient, token_mean, token_ratio
from jaxrl_llm.objectives.off_policy import importance_correction
from jaxrl_llm.replay.base import times_as_many, whole_groups
from jaxrl_llm.utils.errors import InputError, shown


@method(
    paper="arXiv 2506.05316",
    year=2025,
    test="test_replayed.py::test_dots_rr_is_the_loop",
    lacks={
        "predictor": (
            "a language model's embeddings and networks trained before the run; words are counted instead, and 7 "
            "numbers fitted",
            "a model of difficulties",
        )
    },
)
def dots_rr(
    target: Annotated[float, PAPER] = 0.5,
    temperature: Annotated[Positive, PAPER] = 1e-3,
    references: Annotated[int, PAPER] = 256,
    every: Annotated[Count, PAPER] = 2,
    width: Annotated[float, OURS] = 0.2,
    embedding: Annotated[str, OURS] = "",
    fresh_share: Annotated[Share, PAPER] = 0.5,
    replay_groups: Annotated[NonNegativeInt, PAPER] = 512,
    clip_low: Annotated[NonNegative, PAPER] = 0.2,
    clip_high: Annotated[NonNegative, PAPER] = 0.2,
    ddof: Annotated[ZeroOrOne, OURS] = 1,
    epsilon: Annotated[NonNegative, OURS] = 1e-6,
) -> Algorithm:
    """Difficulty-targeted Online Data Selection and Rollout Replay (DOTS + RR).

    In every `every`-th step the groups of `references` more prompts, drawn uniformly, measure success rates d_k and are
    not trained on. Those of the others are predicted by attention to them, and prompts are drawn without replacement:

        p0 = sum_k softmax_k(e_q . e_k / width) d_k,    p = sigmoid(logit(p0) / s + b)
        P proportional to exp(-|p - target| / temperature)

    From the second step on, groups of the store join the fresh ones, (1 - fresh_share)/fresh_share of their number,
    drawn uniformly and whole; it has the newest replay_groups groups with different rewards. prompts_per_step is the
    number of fresh groups. With mu the policy that sampled the token, r = pi/mu, r0 = pi_old/mu (stop-gradient),

        loss = token mean of max(-A r, -A clip(r, r0 (1 - clip_low), r0 (1 + clip_high)))

    which is r0 times PPO's clipped loss in pi/pi_old. A = (reward - mean_g)/(std_g + epsilon) (ddof) is what it was
    when the group was fresh, and then r0 = 1.

    The paper embeds prompts with a language model, maps them by two networks, and computes s and b by a third from the
    mean and deviation of d, all trained before the run on measured rates. Here e are the normalised numbers in the
    column `embedding` of the data set, or, without one, counts of words and pairs of words; the width, s and b are 7
    numbers fitted during the run by the same cross-entropy (`predict`). The paper measures the references
    before it draws the same step's prompts; here they are sampled beside these, and serve the draws after that step.
    """
    near = near_target(target, temperature, attention(references, every, width, embedding or None))
    weighted = importance_correction("token", "truncate", high=math.exp(LARGEST))  # never truncated
    objective = policy_gradient(token_ratio("old"), clip(clip_low, clip_high), token_mean())
    return Algorithm(
        chain(group_relative(ddof=ddof, epsilon=epsilon), weighted), objective,
        curriculum=choose_prompts(reference_groups(references, every), near),
        replay=whole_groups(**times_as_many((1 - fresh_share) / fresh_share), groups=replay_groups),
    )  # fmt: skip


EDGE = 1e-4


def start_predictor(width: float = 0.2) -> Array:
    """f64[7]: log 1/width, then u and v, with which p is p0."""
    return np.array([-np.log(width), np.log(np.e - 1), 0.0, 0.0, 0.0, 0.0, 0.0])


def predict(predictor: Array, queries: Array, keys: Array, labels: Array) -> Array:
    """f64[n]: the predicted success rates of prompts with embeddings `queries` f32[n, D], see above.

    keys f32[K, D], labels f64[K]: embeddings and mean rewards of the references.

    >>> keys = np.array([[1.0, 0], [0, 1], [1, 1]])
    >>> predict(start_predictor(2**0.5), keys[:1], keys, np.array([0.2, 0.8, 0.5])).round(6).tolist()
    [0.438999]
    """
    return _forward(predictor, queries, keys, labels)[0]


def _forward(predictor: Array, queries: Array, keys: Array, labels: Array) -> tuple[Array, Array]:
    """Predictions f64[n], and the derivatives f64[n, 7] of their logits."""
    a = np.exp(predictor[0])
    similar = (queries @ keys.T).astype(np.float64)
    weight = np.exp(a * (similar - similar.max(axis=1, keepdims=True)))
    weight /= weight.sum(axis=1, keepdims=True)
    plain = weight @ labels
    p0 = np.clip(plain, EDGE, 1 - EDGE)
    facts = np.array([1.0, labels.mean(), labels.std()])
    u, v = predictor[1:4] @ facts, predictor[4:7] @ facts
    soft = np.logaddexp(0.0, u)
    flat, logit = np.clip(soft, 1e-2, 10.0), np.log(p0) - np.log1p(-p0)
    p = 1 / (1 + np.exp(-(logit / flat + np.tanh(v))))
    # d p0 / d log a is a times the covariance of similarity and label under the weights.
    moved = a * (((weight * similar) @ labels) - (weight * similar).sum(axis=1) * plain) * (p0 == plain)
    by_u = -logit / flat**2 * (flat == soft) / (1 + np.exp(-u))
    by_v = np.full(len(p), 1 - np.tanh(v) ** 2)
    slopes = [(moved / (p0 * (1 - p0)) / flat)[:, None], by_u[:, None] * facts, by_v[:, None] * facts]
    return p, np.concatenate(slopes, axis=1)


def cross_entropy(predicted: Array, measured: Array) -> float:
    """The mean of -(d log p + (1 - d) log(1 - p)), with p kept off 0 and 1."""
    p = np.clip(predicted, 1e-12, 1 - 1e-12)
    return float(-np.mean(measured * np.log(p) + (1 - measured) * np.log1p(-p)))


def fitted(
    predictor: Array, queries: Array, measured: Array, keys: Array, labels: Array, steps: int = 20, rate: float = 0.05
) -> Array:
    """The predictor after `steps` steps of Adam on the cross-entropy of measured rates f64[n]; the best of them all.

    The step size is `rate`. Nothing is learnt where there is nothing to predict.
    """
    if not len(measured) or not len(labels):
        return predictor
    first, second, now, best = np.zeros(7), np.zeros(7), predictor, (np.inf, predictor)
    for step in range(1, steps + 2):
        p, slopes = _forward(now, queries, keys, labels)
        best = min(best, (cross_entropy(p, measured), now), key=lambda one: one[0])
        gradient = ((p - measured)[:, None] * slopes).mean(axis=0)
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
        now = now - rate * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
    return best[1]


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


@part
def reference_groups(references: Count = 256, every: Count = 2) -> RuleOf:
    """In every `every`-th step, from the first on, sample `references` more prompts, see `references_of`.

    Their groups measure difficulties and are not trained on. Until the next such step no other prompt is drawn twice.
    """

    def make(facts: PromptFacts) -> Machine:
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

    return make


@part
def attention(references: Count = 256, every: Count = 2, width: Positive = 0.2, column: str | None = None) -> ModelOf:
    """Success rates predicted from the last references, which `reference_groups` samples; see `predict`.

    Before the first ones it is 1/2. column: of the data set, with the embedding of each prompt, a list of numbers;
    None: counts of its words and pairs of words, hashed. The metric curriculum/prediction_error is the mean squared
    error on the last references.
    """

    def make(facts: PromptFacts) -> SuccessModel:
        chosen, rank = references_of(facts, references, every), facts.rank
        embedded = word_features(facts) if column is None else _given(facts, column).__getitem__

        def predicted(state: State, prompts: Prompts, random: np.random.Generator) -> Array:
            if not len(state["references"]):
                return np.full(len(prompts.ids), 0.5)
            return predict(state["predictor"], embedded(prompts.ids), embedded(state["references"]), state["rates"])

        def observe(state: State, outcome: Outcome) -> State:
            results = outcome.results
            new = np.isin(results.ids, chosen(outcome.before.step))
            if not new.any():
                return {}
            order = np.argsort(rank[results.ids[new]])
            ids, rates = results.ids[new][order], results.mean[new][order]
            after: State = {"references": ids.astype(np.int32), "rates": rates}
            if len(state["references"]):
                known = embedded(ids), rates, embedded(state["references"]), state["rates"]
                after["error"] = float(np.mean((predict(state["predictor"], known[0], *known[2:]) - rates) ** 2))
                after["predictor"] = fitted(state["predictor"], *known)
            return after

        start = {"references": np.zeros(0, np.int32), "rates": np.zeros(0), "error": 0.0}
        start["predictor"] = start_predictor(width)
        return SuccessModel(predicted, start, observe, lambda state: {"prediction_error": state["error"]})

    return make


def _given(facts: PromptFacts, column: str) -> Array:
    """f32[P, D]: the column's embeddings divided by their norms; InputError for what is no list of D numbers."""
    values, size = facts.column(column), 0
    for number, value in enumerate(values, start=1):
        right = isinstance(value, list | tuple) and value and all(isinstance(x, int | float) for x in value)
        size = size or (len(value) if right else 0)
        if not right or len(value) != size or not np.isfinite(value).all():
            raise InputError(
                f"the column {column!r} of prompt {number} is {shown(value)}, but must be an embedding: a list of "
                f"{size or 'finite'} numbers{', as that of the first prompt' if size else ''}"
            )
    table = np.asarray(values, np.float32)
    return table / np.maximum(np.linalg.norm(table, axis=1, keepdims=True), 1e-9)
