"""Rules of a curriculum, models of the success rate that they use, and the curriculum composed of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core.source import Curriculum, Step
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.curriculum.excluded import Why, first_reason, left_out_metrics
from jaxrl_llm.curriculum.records import (
    Array,
    Memory,
    PromptFacts,
    Prompts,
    Results,
    State,
    grown,
    look_up,
    note,
    results_of,
    start_record,
)
from jaxrl_llm.utils.errors import InputError


class Outcome(NamedTuple):
    """What a rule observes of a step."""

    step: Step
    results: Results
    before: Prompts  # the prompts of the results, with the records of before
    everything: Callable[[], Prompts]  # all prompts, in the order of `PromptFacts.order`, with the records of after


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
    """Rules over one prompt set, with a record of its prompts.

    The state is one dict: the record, and the entries of the rules, under names that begin with their numbers.
    """

    facts: PromptFacts
    memory: Memory
    machines: Sequence[Machine]

    def having(self, name: str) -> list[int]:
        """The numbers of the rules that say something of `name`, a field."""
        return [number for number, machine in enumerate(self.machines) if getattr(machine, name) is not None]

    def begun(self, which: Iterable[int]) -> State:
        """The entries of these rules at the start of a run."""
        return _named((number, self.machines[number].start) for number in which)

    def of(self, name: str, state: State) -> Iterator[tuple[int, Callable[..., Any]]]:
        """The functions `name` of the rules that have one, with their own states given; each after its number."""
        for number in self.having(name):
            machine = self.machines[number]
            own = {one: state[f"rule{number}_{one}"] for one in machine.start}
            yield number, partial(getattr(machine, name), own)

    def prompts(self, state: State, ids: Array) -> Prompts:
        """What the record says of some prompts."""
        return look_up(state, self.memory, ids)

    def why(self, state: State, found: Prompts | None = None) -> Array:
        """uint8[n]: why prompts may not be drawn, by the first rule that leaves each out; found: None for all."""
        found = self.prompts(state, np.arange(self.facts.size)) if found is None else found
        return first_reason((excluded(found) for _, excluded in self.of("excluded", state)), len(found.ids))


def curriculum_of(
    rules: Rules, draws: State, select: Callable[[State, int], tuple[Array, State]], *,
    metrics: Callable[[State], dict[str, float]], observed: Mapping[str, Any] = MappingProxyType({}),
    excluded: Callable[[State], Array] | None = None,
) -> Curriculum:  # fmt: skip
    """The curriculum that draws prompts by `select`, and otherwise does what the rules say.

    draws: the entries of the state beside those of `Rules`; "draws", which changes with each draw, seeds how samples
    are divided. observed: what some of them are after each step. metrics: beside those of the rules. excluded: state ->
    uint8[P], why prompts are not drawn now; None: as the rules say. Raises InputError for an empty prompt set, and
    where several rules give counts or sizes.
    """
    facts, reasons = rules.facts, tuple(dict.fromkeys(one for machine in rules.machines for one in machine.reasons))
    if not facts.size:
        raise InputError("a curriculum needs at least one prompt")
    if len(rules.having("size")) > 1 or len(rules.having("counts")) > 1:
        raise InputError("two rules of a curriculum give counts or sizes: leave out one of them")
    start = {**draws, **start_record(facts.size, rules.memory), **rules.begun(rules.having("start"))}

    def whole(state: State) -> State:
        return grown(state, start, facts.size)

    def observe(state: State, step: Step) -> State:
        state, results = whole(state), results_of(step)
        before, after = rules.prompts(state, results.ids), note(state, rules.memory, results)
        outcome = Outcome(step, results, before, lambda: rules.prompts(after, facts.order))
        changed = _named((number, observe(outcome)) for number, observe in rules.of("observe", state))
        return {**after, **observed, **changed}

    def on_update(state: State, batch: Trajectories) -> State:
        return {**state, **_named((number, learn(batch)) for number, learn in rules.of("on_update", state))}

    def counts(state: State, ids: Array, total: int) -> Array:
        random = np.random.default_rng([facts.seed, 2, state["draws"]])
        ((_, divide),) = rules.of("counts", state)
        return np.asarray(divide(rules.prompts(state, np.asarray(ids, np.int64)), total, random), np.int32)

    def columns(state: State, ids: Array) -> list[dict[str, Any]]:
        given = [columns(ids) for _, columns in rules.of("columns", state)]
        return [{name: one for part in parts for name, one in part.items()} for parts in zip(*given, strict=True)]

    def left_out(state: State) -> Array:
        return (excluded or rules.why)(whole(state))

    def all_metrics(state: State) -> dict[str, float]:
        out = metrics(state) | (left_out_metrics(left_out(state), reasons) if reasons else {})
        return out | {f"curriculum/{k}": x for _, own in rules.of("metrics", state) for k, x in own().items()}

    return Curriculum(
        lambda: start, lambda state, count: select(whole(state), count), observe,
        counts if rules.having("counts") else None, all_metrics, left_out if reasons else None,
        columns if rules.having("columns") else None, on_update,
    )  # fmt: skip


def _named(entries: Iterable[tuple[int, Mapping[str, Any]]]) -> State:
    """The entries of rules by their numbers, as one dict."""
    return {f"rule{number}_{name}": value for number, own in entries for name, value in own.items()}


class SuccessModel(NamedTuple):
    """A model over one prompt set. predict: (state, prompts, generator) -> f64[n], success rates within 0 and 1; state
    and the other functions are as those of a `Machine`."""

    predict: Callable[[State, Prompts, np.random.Generator], Array]
    start: Mapping[str, Any] = MappingProxyType({})
    observe: Callable[[State, Outcome], State] | None = None
    metrics: Callable[[State], Mapping[str, float]] | None = None
    on_update: Callable[[State, Trajectories], State] | None = None

    def rule(self, **uses: Any) -> Machine:
        """The rule that learns this model; uses: `score`, `counts` or others, which read the model's state."""
        return Machine(self.start, observe=self.observe, metrics=self.metrics, on_update=self.on_update, **uses)


ModelOf = Callable[[PromptFacts], SuccessModel]


def posterior_mean(facts: PromptFacts) -> SuccessModel:
    """The mean of the prompt's Beta posterior, which is in the record of `choose_prompts`."""
    return SuccessModel(lambda state, prompts, random: prompts.value)


def posterior_sample(facts: PromptFacts) -> SuccessModel:
    """A draw from the prompt's Beta posterior, another each time."""
    return SuccessModel(lambda state, prompts, random: random.beta(prompts.alpha, prompts.beta))


def prefer(score: Callable[[Array], Array], model: ModelOf) -> RuleOf:
    """Draw prompts by scores of predicted success rates; score: f64[n] -> log-weights f64[n]."""

    def make(facts: PromptFacts) -> Machine:
        own = model(facts)
        return own.rule(score=lambda state, prompts, random: score(own.predict(state, prompts, random)))

    return make
