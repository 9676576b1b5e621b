"""Curricula that draw prompts in shuffled epochs, with rules that leave prompts out or remember what was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core.arguments.checks import require_function
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.source import Curriculum, MakeCurriculum
from jaxrl_llm.curriculum.records import Array, Memory, State, facts_of
from jaxrl_llm.curriculum.rules import RuleOf, Rules, curriculum_of
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs
from jaxrl_llm.utils.errors import InputError


@part
def in_epochs(*rules: RuleOf, at_end: bool = False, restart: bool = False) -> MakeCurriculum:
    """Epochs over all prompts, each in a new random order, without the prompts that rules leave out.

    No rule may score prompts or say how many a step has. at_end: what is left out changes at the end of an epoch only.
    restart: if all prompts are left out, the rules that do so begin anew, and all come back, which the metric
    curriculum/restarts counts; else that is an InputError. The metrics curriculum/left_out/REASON are the shares of
    prompts that are left out.
    """
    for rule in rules:
        require_function("a rule of a curriculum", rule)

    def make(rows: Sequence[dict[str, Any]], seed: int) -> Curriculum:
        stream, facts = shuffled_epochs(rows, seed), facts_of(rows, seed)
        own = Rules(facts, Memory(), [rule(facts) for rule in rules])
        if own.having("score") or own.having("size"):
            raise InputError("in_epochs draws all prompts in turn: leave out rules that score prompts or say how many")
        drops = own.having("excluded")

        def admitted(state: State) -> State:
            """The state with `left_out` as the rules say now."""
            if not (why := own.why(state)).all():
                return {**state, "left_out": why}
            if not restart:
                raise InputError("the policy solves every prompt, so that none is left to train on: add harder ones")
            return {**state, **own.begun(drops), "left_out": np.zeros_like(why), "restarts": state["restarts"] + 1}

        def select(state: State, count: int) -> tuple[Array, State]:
            stream.select(state["stream"], 0)  # InputError for a state of other prompts
            chosen = [np.zeros(0, np.int32)]
            while count:
                left = facts.size - state["draws"] % facts.size  # of the epoch
                if drops and (left == facts.size or not at_end):
                    state = admitted(state)
                drawn, at = stream.select(state["stream"], min(count, left))
                state = {**state, "stream": at, "draws": state["draws"] + len(drawn)}
                chosen.append(drawn[state["left_out"][drawn] == 0] if drops else drawn)
                count -= len(chosen[-1])
            return np.concatenate(chosen), state

        def metrics(state: State) -> dict[str, float]:
            return {"curriculum/restarts": float(state["restarts"])} if restart else {}

        start: State = {"stream": stream.init(), "draws": 0, "restarts": 0}
        start |= {"left_out": np.zeros(facts.size, np.uint8)} if drops else {}
        return curriculum_of(
            own, start, select, metrics=metrics, excluded=(lambda state: state["left_out"]) if at_end else None
        )  # fmt: skip

    return make
