"""A rule of a curriculum that draws prompts by the uncertainty of a tracker, which forgets as the policy moves."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.curriculum.compose import Machine, RuleOf
from jaxrl_llm.curriculum.records import Array, PromptFacts, Prompts, State, changed
from jaxrl_llm.utils.errors import InputError, shown


@part
def tracked_uncertainty(
    floor: float = 0.05,
    half_life: float = 0.06,
    least: float = 0.875,
    most: float = 0.96,
    column: str | None = None,
    samples: int = 8,
) -> RuleOf:
    """Weights sqrt(v (1 - v)) + floor, with v the estimate of `advantages.trackers.tracked_baseline` for the prompt.

    It is updated after each update of the policy, from the prepared batch and its info["drift"], as that tracker is,
    and a prompt of which the run's own tracker says v has the same v here. column: of the data set, with the mean
    reward of `samples` samples of each prompt before the run, from which trackers start; None: at 1/2. The metric
    curriculum/drift is the mean drift of the last update's prompts that had been answered before, 0 without such.
    """
    check_number("tracked_uncertainty: floor", floor, above=0)
    check_number("tracked_uncertainty: half_life", half_life, above=0)
    check_number("tracked_uncertainty: least", least, least=0, most=1)
    check_number("tracked_uncertainty: most", most, least=0, most=1)
    check_number("tracked_uncertainty: samples", samples, least=1, whole=True)

    def score(state: State, prompts: Prompts, random: np.random.Generator) -> Array:
        v = np.clip(state["value"][prompts.ids].astype(np.float64), 0.0, 1.0)
        return np.log(np.sqrt(v * (1 - v)) + floor)

    def learned(state: State, batch: Trajectories) -> State:
        info = batch.info or {}
        reward = np.where(np.asarray(batch.action_mask).any(axis=1), np.asarray(batch.need("reward")), np.nan)
        known = ~np.isnan(reward) & ~(np.asarray(info.get("measured", np.zeros(len(reward)))) > 0)
        ids, at = np.unique(np.asarray(batch.prompt_id)[known], return_inverse=True)
        value, memory, seen = (state[name][ids] for name in ("value", "memory", "seen"))
        kept, moved = np.full(len(at), least), np.zeros(0)
        if "drift" in info:
            D = np.where(seen[at], np.asarray(info["drift"])[known], 0.0)
            moved = D[seen[at] & ~np.isnan(D)]
            kept = np.where(np.isnan(D), least, np.clip(np.exp2(-D / half_life), least, most))
        n, total, share = (np.bincount(at, x, len(ids)) for x in (np.ones(len(at)), reward[known], kept))
        after = share / np.maximum(n, 1) * memory + n
        new = {"value": value + (total - n * value) / np.maximum(after, 1e-9), "memory": after, "seen": True}
        arrays = {name: changed(state[name], ids, x) for name, x in new.items()}
        return {**arrays, "drift": float(moved.mean()) if len(moved) else 0.0}

    def make(facts: PromptFacts) -> Machine:
        value, memory = np.full(facts.size, 0.5, np.float32), np.ones(facts.size, np.float32)
        if column is not None:
            mean = _means(facts, column)
            value, memory = ((samples * mean + 0.5) / (samples + 1)).astype(np.float32), memory / np.float32(1 - least)
        start = {"value": value, "memory": memory, "seen": np.zeros(facts.size, bool)}
        metrics: Any = lambda state: {"drift": state["drift"]}  # noqa: E731
        return Machine({**start, "drift": 0.0}, score=score, learned=learned, metrics=metrics)

    return make


def _means(facts: PromptFacts, column: str) -> Array:
    """f64[P]: the column's mean rewards; InputError for what is no number from 0 to 1."""
    values = facts.column(column)
    for number, value in enumerate(values, start=1):
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise InputError(
                f"the column {column!r} of prompt {number} is {shown(value)}, but must be a mean reward from 0 to 1"
            )
    return np.asarray(values, np.float64)
