"""A rule of a curriculum that draws prompts whose predicted success rate is near a target."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.curriculum.compose import Machine, RuleOf
from jaxrl_llm.curriculum.difficulty import fitted, predict, start_predictor
from jaxrl_llm.curriculum.excluded import Why, where
from jaxrl_llm.curriculum.neighbours import WIDTH, features_of
from jaxrl_llm.curriculum.records import Array, PromptFacts, Prompts, State
from jaxrl_llm.rollouts.runtime.group_results import Results
from jaxrl_llm.utils.errors import InputError, shown

_FIRST = 1e12  # a score above those of all others


@part
def near_predicted(
    target: float = 0.5,
    temperature: float = 1e-3,
    references: int = 256,
    every: int = 2,
    width: float = 0.2,
    column: str | None = None,
) -> RuleOf:
    """Weights exp(-|p - target| / temperature), with p predicted from reference prompts; see `curriculum.difficulty`.

    In every `every`-th step, from the first on, `references` more prompts are sampled than the step has, chosen
    uniformly: their groups measure difficulties and are not trained on. Until the next such step all other prompts are
    predicted from them, and none is drawn twice. The first draws are uniform. There are at most half as many references
    as prompts. column: of the data set, with the embedding of each prompt, a list of numbers; None: counts of its words
    and pairs of words, hashed. The metric curriculum/prediction_error is the mean squared error on the last references.
    """
    check_number("near_predicted: target", target, least=0, most=1)
    check_number("near_predicted: temperature", temperature, above=0)
    check_number("near_predicted: references", references, least=1, whole=True)
    check_number("near_predicted: every", every, least=1, whole=True)
    check_number("near_predicted: width", width, above=0)

    def make(facts: PromptFacts) -> Machine:
        K = min(references, facts.size // 2)
        embedded = _embeddings(facts, column)

        def chosen(state: State) -> Array:
            """The references of this step; none in most."""
            if not K or state["step"] % every:
                return np.zeros(0, np.int64)
            random = np.random.default_rng([facts.seed, 3, state["step"]])
            return facts.order[random.choice(facts.size, K, replace=False)]

        def left_out(state: State, prompts: Prompts) -> Array:
            drawn = np.isin(prompts.ids, state["drawn"]) & ~np.isin(prompts.ids, chosen(state))
            return where(Why.RECENT, drawn)

        def score(state: State, prompts: Prompts, random: np.random.Generator) -> Array:
            near = np.zeros(len(prompts.ids))
            if len(state["references"]):
                keys = embedded(state["references"])
                p = predict(state["predictor"], embedded(prompts.ids), keys, state["rates"])
                near = -np.abs(p - target) / temperature
            return np.where(np.isin(prompts.ids, chosen(state)), _FIRST, near)

        def observe(state: State, results: Results, before: Prompts, everything: Any) -> State:
            asked = chosen(state)
            new, step = np.isin(results.ids, asked), state["step"] + 1
            others = results.ids[~new].astype(np.int32)
            drawn = np.zeros(0, np.int32) if step % every == 0 else np.concatenate([state["drawn"], others])
            after = {**state, "step": step, "drawn": drawn}
            if not new.any():
                return after
            order = np.argsort(rank[results.ids[new]])
            ids, rates = results.ids[new][order], results.mean[new][order]
            if len(state["references"]):
                known = embedded(ids), rates, embedded(state["references"]), state["rates"]
                error = float(np.mean((predict(state["predictor"], known[0], *known[2:]) - rates) ** 2))
                after |= {"predictor": fitted(state["predictor"], *known), "error": error}
            return {**after, "references": ids.astype(np.int32), "rates": rates}

        def only_measured(state: State, ids: Array) -> Array:
            return np.isin(ids, chosen(state))

        rank = np.empty(facts.size, np.int64)
        rank[facts.order] = np.arange(facts.size)
        start = {
            "step": 0, "drawn": np.zeros(0, np.int32), "references": np.zeros(0, np.int32), "rates": np.zeros(0),
            "predictor": start_predictor(width), "error": 0.0,
        }  # fmt: skip
        return Machine(
            start, score, left_out, lambda state, count: count + len(chosen(state)), observe=observe,
            metrics=lambda state: {"prediction_error": state["error"]}, reasons=(Why.RECENT,),
            only_measured=only_measured,
        )  # fmt: skip

    return make


def _embeddings(facts: PromptFacts, column: str | None) -> Any:
    """A function of ids int[n] that gives the embeddings f32[n, D], of norm 1. Those of words are made when needed."""
    if column is not None:
        return _given(facts, column).__getitem__
    table, made = np.zeros((facts.size, WIDTH), np.float32), np.zeros(facts.size, bool)

    def of_words(ids: Array) -> Array:
        for i in np.unique(ids[~made[ids]]).tolist():
            table[i], made[i] = features_of(facts.rows[i]), True
        return table[ids]

    return of_words


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
