"""Rules of a curriculum that leave prompts out: solved ones, and those of other stages, from easy to hard."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import numpy as np

from jaxrl_llm.core.arguments.ranges import Count, Fraction, NonNegativeInt, Range
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.source import Step
from jaxrl_llm.curriculum.excluded import Why, where
from jaxrl_llm.curriculum.records import Array, PromptFacts, Prompts, State, changed, results_of
from jaxrl_llm.curriculum.rules import Machine, Outcome, RuleOf
from jaxrl_llm.curriculum.scores import set_scores, sets_of
from jaxrl_llm.utils.errors import InputError

Measure = Callable[[Step], tuple[Array, Array]]  # the prompts of a step, ids int[n], and how far each is solved, f64[n]


def mean_reward(step: Step) -> tuple[Array, Array]:
    """The mean reward of each prompt's samples, each clipped to [0, 1]."""
    results = results_of(step)
    return results.ids, results.mean


@part
def drop_solved(
    at: Fraction = 1.0,
    visits: Annotated[int, Range(least=1, most=255)] = 1,
    back: Count | None = None,
    *,
    measure: Measure = mean_reward,
    start: NonNegativeInt = 0,
) -> RuleOf:
    """Drop prompts whose `measure` is at least `at` in `visits` visits in a row.

    back: steps after which a dropped prompt is drawn again (None: never). If it is then not solved, it stays; the
    metric curriculum/returned counts those. start: visits count from this step on.
    """

    def left_out(state: State, prompts: Prompts) -> Array:
        since = state["since"][prompts.ids]
        out = since >= 0
        return where(Why.SOLVED, out if back is None else out & (prompts.step - since < back))

    def observe(state: State, outcome: Outcome) -> State:
        step = outcome.before.step
        if step < start:
            return {}
        ids, solved = measure(outcome.step)
        streak = np.where(solved >= at, np.minimum(state["streak"][ids].astype(np.int64) + 1, 255), 0)
        out, was = streak >= visits, state["since"][ids] >= 0
        return {
            "since": changed(state["since"], ids, np.where(out, step, -1)),
            "streak": changed(state["streak"], ids, streak),
            "returned": state["returned"] + int(np.sum(was & ~out)),
        }

    def metrics(state: State) -> dict[str, float]:
        return {"returned": float(state["returned"])} if back is not None or state["returned"] else {}

    def make(facts: PromptFacts) -> Machine:
        empty = {"since": np.full(facts.size, -1, np.int32), "streak": np.zeros(facts.size, np.uint8), "returned": 0}
        return Machine(empty, excluded=left_out, observe=observe, metrics=metrics, reasons=(Why.SOLVED,))

    return make


@part
def staged(
    column: str, steps: Count, earlier: Annotated[float, Range(least=0, below=1)] = 0.0, order: Sequence[Any] = ()
) -> RuleOf:
    """Stages of `steps` steps each, one for each value of a column; the last stage lasts to the end of the run.

    Values are in ascending order, or in the `order` given. earlier: the share of prompts of earlier stages.
    Raises InputError where the order lacks a value of the column.
    """

    def make(facts: PromptFacts) -> Machine:
        names, place = sets_of(facts, column)
        if order:
            if unknown := [name for name in names if name not in order]:
                raise InputError(f"the order of stages has no {unknown[0]!r}, which the column {column!r} has: add it")
            ranks = np.array([list(order).index(name) for name in names], np.int32)
            place = np.unique(ranks[place], return_inverse=True)[1].astype(np.int32)
        last = int(place.max())

        def stage(step: int) -> int:
            return min(step // steps, last)

        def left_out(state: State, prompts: Prompts) -> Array:
            mine, now = place[prompts.ids], stage(prompts.step)
            return where(Why.LATER, mine > now) + where(Why.EARLIER, (mine < now) & (earlier == 0))

        def score(state: State, prompts: Prompts, random: np.random.Generator) -> Array:
            current = (place[prompts.ids] == stage(prompts.step)).astype(np.int32)
            return set_scores(np.array([earlier, 1 - earlier]), current)

        def observe(state: State, outcome: Outcome) -> State:
            return {"stage": stage(outcome.before.step + 1)}

        return Machine(
            {"stage": 0}, score, left_out, observe=observe, metrics=lambda state: {"stage": float(state["stage"])},
            reasons=(Why.LATER, Why.EARLIER) if earlier == 0 else (Why.LATER,),
        )  # fmt: skip

    return make
