"""Rules of a curriculum that leave prompts out: stages, solved prompts that are dropped, phases of hard prompts."""

from __future__ import annotations

from typing import Annotated

import numpy as np

from jaxrl_llm.core.ranges import Count, Fraction, Range
from jaxrl_llm.core.repr import part
from jaxrl_llm.curriculum.excluded import Why, where
from jaxrl_llm.curriculum.records import Array, PromptFacts, Prompts, State, changed
from jaxrl_llm.curriculum.rules import Machine, Outcome, RuleOf


@part
def drop_solved(
    at: Fraction = 1.0, visits: Annotated[int, Range(least=1, most=255)] = 1, back: Count | None = None
) -> RuleOf:
    """Drop prompts whose group has a mean reward of at least `at` in `visits` visits in a row.

    back: steps after which a dropped prompt is drawn again (None: never). If it is then not solved, it stays; the
    metric curriculum/returned counts those.
    """

    def left_out(state: State, prompts: Prompts) -> Array:
        since = state["since"][prompts.ids]
        out = since >= 0
        return where(Why.SOLVED, out if back is None else out & (prompts.step - since < back))

    def observe(state: State, outcome: Outcome) -> State:
        ids = outcome.results.ids
        streak = np.where(outcome.results.mean >= at, np.minimum(state["streak"][ids].astype(np.int64) + 1, 255), 0)
        out, was = streak >= visits, state["since"][ids] >= 0
        return {
            "since": changed(state["since"], ids, np.where(out, outcome.before.step, -1)),
            "streak": changed(state["streak"], ids, streak),
            "returned": state["returned"] + int(np.sum(was & ~out)),
        }

    def make(facts: PromptFacts) -> Machine:
        start = {"since": np.full(facts.size, -1, np.int32), "streak": np.zeros(facts.size, np.uint8)}
        return Machine(
            {**start, "returned": 0}, excluded=left_out, observe=observe,
            metrics=lambda state: {"returned": float(state["returned"])}, reasons=(Why.SOLVED,),
        )  # fmt: skip

    return make
