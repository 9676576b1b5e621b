"""Curriculum-Reinforced Agent for GUI Tasks (CRAFT-GUI)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np

from jaxrl_llm.algorithms.classic.grpo import grpo
from jaxrl_llm.algorithms.method import method
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.hyperparameters import OURS
from jaxrl_llm.core.ranges import Count, NonNegative, Range
from jaxrl_llm.core.repr import part
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.excluded import Why, where
from jaxrl_llm.curriculum.records import Array, PromptFacts, Prompts, State
from jaxrl_llm.curriculum.rules import Machine, Outcome, RuleOf
from jaxrl_llm.curriculum.scores import set_scores, sets_of
from jaxrl_llm.utils.errors import InputError


@method(
    paper="arXiv 2508.11360",
    year=2025,
    test="test_curricula.py::test_craft_gui_trains_on_stages",
    beside={"vision": ("screens or images as they are; a prompt describes them", "a policy that sees")},
)
def craft_gui(
    column: Annotated[str, OURS] = "stage",
    stage_steps: Annotated[int, OURS] = 100,
    earlier_share: Annotated[float, OURS] = 0.0,
    order: Annotated[str, OURS] = "",
    clip_low: Annotated[NonNegative, OURS] = 0.2,
    clip_high: Annotated[NonNegative, OURS] = 0.2,
    kl_coefficient: Annotated[NonNegative, OURS] = 0.04,
) -> Algorithm:
    """Curriculum-Reinforced Agent for GUI Tasks (CRAFT-GUI).

    GRPO (clip_low, clip_high, kl_coefficient) over stages from easy to hard. Each value of a `column` of the data set
    is a stage of stage_steps steps, and the last goes on to the end. They are in ascending order, or in `order`, the
    values with commas between them. earlier_share: the share of prompts from earlier stages.

    The paper's reward is a weighted sum of checks by rule, of format, kind of action and parameters, and a judge's
    score of open answers. They are the run's rewards, with their weights: `--rewards gui_format gui_kind gui_parameter
    FILE.py:JUDGE`, where the judge returns None for what is no answer to a question. The paper's numbers were not
    available. Screens are out of scope: a prompt describes them.
    """
    names = tuple(name.strip() for name in order.split(",") if name.strip())
    curriculum = choose_prompts(staged(column, stage_steps, earlier_share, names))
    return replace(grpo(clip_low, clip_high, kl_coefficient), curriculum=curriculum)


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
