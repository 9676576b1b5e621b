"""A curriculum of the prompts that the policy does not always solve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.source import Curriculum, MakeCurriculum, State, Step
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.curriculum.excluded import Why, left_out_metrics, where
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs
from jaxrl_llm.utils.errors import InputError


@part
def without_solved(success: float = 0.0, accuracy: str | None = None, start: int = 0) -> MakeCurriculum:
    """Epochs over all prompts, in random order, without those of which a whole group succeeded from step `start` on.

    A sample succeeds as in `repair.succeeds`, and a group with a guided sample (info["guided"]) is never solved. The
    metric "curriculum/left_out/solved" is the share of prompts that are left out. InputError when none is left.
    """
    check_number("start", start, least=0, whole=True)

    def make(rows: Sequence[dict[str, Any]], seed: int) -> Curriculum:
        epochs = shuffled_epochs(rows, seed)

        def select(state: State, count: int) -> tuple[np.ndarray, State]:
            order, solved, ids = state["order"], np.asarray(state["solved"], bool), list[int]()
            if count and solved.all():
                raise InputError("the policy solves every prompt, so that none is left to train on: add harder ones")
            while len(ids) < count:
                drawn, order = epochs.select(order, count - len(ids))
                ids += [int(i) for i in drawn if not solved[i]]
            return np.asarray(ids, np.int32), {**state, "order": order}

        def observe(state: State, step: Step) -> State:
            solved = np.array(state["solved"], bool)
            if state["steps"] >= start:
                solved[solved_prompts(step.scored.batch, success, accuracy)] = True
            return {**state, "solved": solved, "steps": state["steps"] + 1}

        def left_out(state: State) -> np.ndarray:
            return where(Why.SOLVED, np.asarray(state["solved"], bool))

        return Curriculum(
            lambda: {"order": epochs.init(), "solved": np.zeros(len(rows), bool), "steps": 0}, select, observe,
            metrics=lambda state: left_out_metrics(left_out(state), (Why.SOLVED,)), left_out=left_out,
        )  # fmt: skip

    return make


def solved_prompts(batch: Trajectories, success: float, accuracy: str | None = None) -> np.ndarray:
    """int[...]: ids of the prompts with a group in which every row with actions succeeds, and none was guided."""
    value = np.asarray(batch.need("reward") if accuracy is None else (batch.rewards or {})[accuracy])
    guided = np.asarray((batch.info or {}).get("guided", np.zeros(len(value))))
    action = np.asarray(batch.action_mask).any(axis=1)
    right = (value > success) & ~(guided == 1)
    group = np.asarray(batch.group)
    failed, tried = np.unique(group[action & ~right]), np.unique(group[action])
    done = np.setdiff1d(tried, failed)
    return np.unique(np.asarray(batch.prompt_id)[action & np.isin(group, done)])
