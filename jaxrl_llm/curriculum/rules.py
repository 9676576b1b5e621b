"""Rules of a curriculum, and their composition: several rules over one prompt set."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core.source import Step
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.curriculum.excluded import Why, first_reason, left_out_metrics
from jaxrl_llm.curriculum.records import Array, PromptFacts, Prompts, State
from jaxrl_llm.rollouts.runtime.group_results import Results


class Outcome(NamedTuple):
    """What a rule observes of a step."""

    step: Step
    results: Results
    before: Prompts
    """The prompts of the results, with the records of before."""
    everything: Callable[[], Prompts]
    """All prompts, in the order of `PromptFacts.order`, with the records of after."""


class Machine(NamedTuple):
    """A rule over one prompt set: functions of its own state, a dict of JSON values and arrays. None: it has no say.

    score: (state, prompts, generator) -> f64[n]. The scores of all rules are added; the largest are drawn.
    excluded: (state, prompts) -> uint8[n], why a prompt may not be drawn (`excluded.Why`; 0: it may). A prompt is drawn
    if no rule leaves it out. reasons: those that it gives.
    size: (state, count) -> the number of prompts to draw, where a step would have `count`.
    counts: (state, prompts, total, generator) -> samples int[n] of each, at least 1, which add up to `total`.
    observe: (state, outcome of a step) -> the entries of the state that change.
    on_update: (state, the batch after the update) -> the entries of the state that change, see `core.source.Source`.
    columns: (state, ids int[n]) -> columns of each prompt's row, see `core.source.Curriculum`.
    """

    start: Mapping[str, Any] = MappingProxyType({})
    score: Callable[[State, Prompts, np.random.Generator], Array] | None = None
    excluded: Callable[[State, Prompts], Array] | None = None
    size: Callable[[State, int], int] | None = None
    counts: Callable[[State, Prompts, int, np.random.Generator], Array] | None = None
    observe: Callable[[State, Outcome], State] | None = None
    metrics: Callable[[State], Mapping[str, float]] | None = None
    reasons: tuple[Why, ...] = ()
    on_update: Callable[[State, Trajectories], State] | None = None
    columns: Callable[[State, Array], Sequence[Mapping[str, Any]]] | None = None


RuleOf = Callable[[PromptFacts], Machine]


class Rules(NamedTuple):
    """Rules over one prompt set; their states are entries of one dict, under names that begin with their numbers."""

    machines: Sequence[Machine]

    def start(self) -> State:
        """The entries of the rules at the start of a run."""
        return _named((number, machine.start) for number, machine in enumerate(self.machines))

    def having(self, name: str) -> list[int]:
        """The numbers of the rules that have the function `name`."""
        return [number for number, machine in enumerate(self.machines) if getattr(machine, name) is not None]

    def of(self, name: str, state: State) -> Iterator[tuple[int, Callable[..., Any]]]:
        """The functions `name` of the rules that have one, with their own states given; each after its number."""
        for number in self.having(name):
            machine = self.machines[number]
            own = {one: state[f"rule{number}_{one}"] for one in machine.start}
            yield number, partial(getattr(machine, name), own)

    @property
    def reasons(self) -> tuple[Why, ...]:
        """Why rules leave prompts out."""
        return tuple(dict.fromkeys(reason for machine in self.machines for reason in machine.reasons))

    def why(self, state: State, found: Prompts) -> Array:
        """uint8[n]: why a prompt may not be drawn, by the first rule that leaves it out."""
        return first_reason((excluded(found) for _, excluded in self.of("excluded", state)), len(found.ids))

    def observe(self, state: State, outcome: Outcome) -> State:
        """The entries that change with a step."""
        return _named((number, observe(outcome)) for number, observe in self.of("observe", state))

    def on_update(self, state: State, batch: Trajectories) -> State:
        """The whole state after an update."""
        return {**state, **_named((number, learn(batch)) for number, learn in self.of("on_update", state))}

    def columns(self, state: State, ids: Array) -> list[dict[str, Any]]:
        """The columns of each prompt's row."""
        given = [columns(ids) for _, columns in self.of("columns", state)]
        return [{name: one for part in parts for name, one in part.items()} for parts in zip(*given, strict=True)]

    def metrics(self, state: State, why: Array | None) -> dict[str, float]:
        """The metrics of the rules, and the shares of prompts that are left out; why: of all prompts."""
        out = left_out_metrics(why, self.reasons) if why is not None else {}
        return out | {f"curriculum/{k}": x for _, metrics in self.of("metrics", state) for k, x in metrics().items()}


def _named(entries: Iterable[tuple[int, Mapping[str, Any]]]) -> State:
    """The entries of rules by their numbers, as one dict."""
    return {f"rule{number}_{name}": value for number, own in entries for name, value in own.items()}
