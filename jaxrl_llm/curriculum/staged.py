"""Stages of a run by a column of the data set, from easy to hard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np

from jaxrl_llm.core.arguments.ranges import Count, Range
from jaxrl_llm.core.repr import part
from jaxrl_llm.curriculum.excluded import Why, where
from jaxrl_llm.curriculum.records import Array, PromptFacts, Prompts, State
from jaxrl_llm.curriculum.rules import Machine, Outcome, RuleOf
from jaxrl_llm.curriculum.scores import set_scores, sets_of
from jaxrl_llm.utils.errors import InputError


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
