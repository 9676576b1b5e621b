"""A curriculum of epochs that drops prompts which the policy solves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.source import Curriculum, MakeCurriculum, Step
from jaxrl_llm.curriculum.excluded import Why, left_out_metrics, where
from jaxrl_llm.replay.into_groups import outcomes

State = dict[str, Any]


@part
def epochs_without_solved(solved: float = 0.9, success: float = 0.0, component: str | None = None) -> MakeCurriculum:
    """Epochs in random order; at the end of each, prompts whose last solve rate is at least `solved` are dropped.

    The solve rate is the share of a group's samples with an outcome above `success`. component: the reward that is the
    outcome; None: their combination. If all prompts are dropped, all come back: metric "curriculum/restarts". Metric
    "curriculum/left_out/solved": the share of dropped ones.
    """
    check_number("solved", solved, above=0, most=1)
    check_number("success", success)

    def make(rows: Sequence[dict[str, Any]], seed: int) -> Curriculum:
        number = len(rows)

        def epoch(state: State) -> State:
            left = state["left"] & ~(state["rate"] >= solved)
            restarts = state["restarts"] + (not left.any())
            left = left if left.any() else np.ones(number, bool)
            order = np.random.default_rng([seed, state["epoch"] + 1]).permutation(np.flatnonzero(left))
            rate = np.where(left & (state["rate"] >= solved), 0.0, state["rate"]).astype(np.float32)
            return {
                "order": order.astype(np.int32), "at": 0, "epoch": state["epoch"] + 1, "left": left, "rate": rate,
                "restarts": int(restarts),
            }  # fmt: skip

        def init() -> State:
            return epoch({"left": np.ones(number, bool), "rate": np.zeros(number, np.float32), "epoch": -1,
                          "restarts": 0})  # fmt: skip

        def select(state: State, count: int) -> tuple[np.ndarray, State]:
            chosen = [np.zeros(0, np.int32)]
            while count:
                if state["at"] == len(state["order"]):
                    state = epoch(state)
                taken = state["order"][state["at"] : state["at"] + count]
                chosen.append(taken)
                state, count = {**state, "at": state["at"] + len(taken)}, count - len(taken)
            return np.concatenate(chosen), state

        def observe(state: State, step: Step) -> State:
            outcome, prompt = outcomes(step.scored, component), np.asarray(step.scored.batch.prompt_id)
            known, rate = ~np.isnan(outcome), state["rate"].copy()
            ids, index = np.unique(prompt[known], return_inverse=True)
            if len(ids):
                rate[ids] = np.bincount(index, outcome[known] > success) / np.bincount(index)
            return {**state, "rate": rate}

        def left_out(state: State) -> np.ndarray:
            return where(Why.SOLVED, ~state["left"])

        def metrics(state: State) -> dict[str, float]:
            return {
                **left_out_metrics(left_out(state), (Why.SOLVED,)),
                "curriculum/restarts": float(state["restarts"]),
            }

        return Curriculum(init, select, observe, metrics=metrics, left_out=left_out)

    return make
