"""The rule of a curriculum that leaves out solved prompts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import numpy as np

from jaxrl_llm.core.arguments.ranges import Count, Fraction, NonNegativeInt, Range
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.source import Step
from jaxrl_llm.curriculum.excluded import Why, where
from jaxrl_llm.curriculum.records import Array, PromptFacts, Prompts, State, changed
from jaxrl_llm.curriculum.rules import Machine, Outcome, RuleOf
from jaxrl_llm.rollouts.runtime.group_results import results_of

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
