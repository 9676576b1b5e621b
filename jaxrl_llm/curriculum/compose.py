"""Curricula over a prompt set: what is known of each prompt, and rules that say which prompts are drawn.

`choose_prompts` composes rules, each of which gives scores, leaves prompts out, or divides a step's samples. The rules
are in `scores`, `stages` and `budgets`.

Draws are made with a generator keyed on (seed, number of draws so far), over prompts in the order of their digests. A
resumed run therefore draws the same prompts, and another order of the rows draws the same prompts of the file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core.objective import require_function
from jaxrl_llm.core.ranges import Count, Fraction, NonNegative, check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.source import Curriculum, MakeCurriculum, Step
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.curriculum.excluded import Why, first_reason, left_out_metrics
from jaxrl_llm.curriculum.records import (
    Array,
    Memory,
    PromptFacts,
    Prompts,
    State,
    facts_of,
    grown,
    look_up,
    note,
    start_record,
)
from jaxrl_llm.rollouts.runtime.group_results import Results, results_of
from jaxrl_llm.utils.errors import InputError

POOL = 65_536  # candidates of a draw


class Machine(NamedTuple):
    """A rule over one prompt set: functions of its own state, a dict of JSON values and arrays. None: it has no say.

    score: (state, prompts, generator) -> f64[n]. The scores of all rules are added; the largest are drawn.
    excluded: (state, prompts) -> uint8[n], why a prompt may not be drawn (`excluded.Why`; 0: it may). A prompt is drawn
    if no rule leaves it out. reasons: those that it gives.
    size: (state, count) -> the number of prompts to draw, where a step would have `count`.
    counts: (state, prompts, total, generator) -> samples int[n] of each, at least 1, which add up to `total`.
    observe: (state, results, the prompts of the results with the records of before) -> state.
    on_update: (state, the batch after the update) -> state, see `core.source.Source`.
    columns: (state, ids int[n]) -> columns of each prompt's row, see `core.source.Curriculum`.
    """

    start: Mapping[str, Any] = MappingProxyType({})
    score: Callable[[State, Prompts, np.random.Generator], Array] | None = None
    excluded: Callable[[State, Prompts], Array] | None = None
    size: Callable[[State, int], int] | None = None
    counts: Callable[[State, Prompts, int, np.random.Generator], Array] | None = None
    observe: Callable[[State, Results, Prompts, Callable[[], Prompts]], State] | None = None
    metrics: Callable[[State], Mapping[str, float]] | None = None
    reasons: tuple[Why, ...] = ()
    on_update: Callable[[State, Trajectories], State] | None = None
    columns: Callable[[State, Array], Sequence[Mapping[str, Any]]] | None = None


RuleOf = Callable[[PromptFacts], Machine]


@part
def choose_prompts(
    *rules: RuleOf,
    noise: NonNegative = 1.0,
    prior: tuple[float, float] = (1.0, 1.0),
    kept: Fraction = 1.0,
    faded: Fraction = 1.0,
    pool: Count = POOL,
) -> MakeCurriculum:
    """The curriculum that draws the prompts with the largest scores, the sum of those of the rules.

    noise: times Gumbel noise is added to the scores; with 1 they are log-weights, and prompts are drawn in proportion
    to exp(score) without replacement; with 0 the largest are taken, and ties are broken at random. prior, kept, faded:
    see `records.Memory`. pool: a draw considers at most this many prompts, chosen at random.

    A prompt is drawn again in the same step only if all others are left out. If all prompts are left out, prompts are
    drawn from all; the metric curriculum/forced counts them, and the metrics curriculum/left_out/REASON are the shares
    of prompts that are left out, by the reason of the first rule that does. At most one rule may give counts, and one
    a size.
    """
    for rule in rules:
        require_function("a rule of a curriculum", rule)
    for number in prior:
        check_number("choose_prompts: prior", number, above=0)

    def make(rows: Sequence[Mapping[str, Any]], seed: int) -> Curriculum:
        facts = facts_of(rows, seed)
        return _curriculum(facts, [rule(facts) for rule in rules], noise, Memory(prior, kept, faded), pool)

    return make


def _curriculum(facts: PromptFacts, machines: list[Machine], noise: float, memory: Memory, pool: int) -> Curriculum:
    """The curriculum of machines, whose states are entries of one dict, under names that begin with their numbers."""
    if not facts.size:
        raise InputError("a curriculum needs at least one prompt")
    start: State = {"draws": 0, "forced": 0, "pending": np.zeros(0, np.int32), **start_record(facts.size, memory)}
    for number, machine in enumerate(machines):
        start |= {f"rule{number}_{name}": value for name, value in machine.start.items()}
    reasons = tuple(dict.fromkeys(reason for machine in machines for reason in machine.reasons))
    (sizes, counters) = ([i for i, m in enumerate(machines) if getattr(m, name)] for name in ("size", "counts"))
    if len(sizes) > 1 or len(counters) > 1:
        raise InputError("two rules of a curriculum give counts or sizes: leave out one of them")

    def own(state: State, number: int) -> State:
        return {name: state[f"rule{number}_{name}"] for name in machines[number].start}

    def why(state: State, found: Prompts) -> Array:
        given = (machine.excluded(own(state, i), found) for i, machine in enumerate(machines) if machine.excluded)
        return first_reason(given, len(found.ids))

    def admitted(state: State, ids: Array) -> Prompts:
        found = look_up(state, memory, ids)
        allowed = why(state, found) == Why.DRAWN
        return found if allowed.all() else look_up(state, memory, ids[allowed])

    def left_out(state: State) -> Array:
        state = grown(state, start, facts.size)
        return why(state, look_up(state, memory, np.arange(facts.size)))

    def select(state: State, count: int) -> tuple[Array, State]:
        state = grown(state, start, facts.size)
        if count < 1:
            return np.zeros(0, np.int32), state
        random = np.random.default_rng([facts.seed, 1, state["draws"]])
        for number in sizes:
            count = max(1, machines[number].size(own(state, number), count))  # type: ignore[misc]
        ids = facts.order[_places(random, facts.size, pool)]
        found = admitted(state, _without(ids, state["pending"]))
        if len(found.ids) < count and facts.size > pool:
            ids = facts.order[random.permutation(facts.size)]
            found = admitted(state, _without(ids, state["pending"]))
        chosen, forced = _best(state, found, count, random), 0
        if len(chosen) < count:
            again = admitted(state, ids)
            forced = 0 if len(again.ids) else count - len(chosen)
            again = again if len(again.ids) else look_up(state, memory, ids)
            ranked = np.concatenate([chosen, np.setdiff1d(_best(state, again, count, random), chosen)])
            chosen = np.resize(ranked, count)
        pending = np.concatenate([state["pending"], chosen.astype(np.int32)])
        after = {"draws": state["draws"] + 1, "forced": state["forced"] + forced, "pending": pending}
        return chosen.astype(np.int32), {**state, **after}

    def _best(state: State, found: Prompts, count: int, random: np.random.Generator) -> Array:
        """The ids of at most `count` prompts with the largest scores, the largest first."""
        total = np.zeros(len(found.ids))
        for number, machine in enumerate(machines):
            if machine.score is not None:
                total += machine.score(own(state, number), found, random)
        if noise:
            total += noise * random.gumbel(size=len(total))
        if count < len(total):
            least = np.partition(total, len(total) - count)[len(total) - count]
            above, equal = np.flatnonzero(total > least), np.flatnonzero(total == least)
            top = np.concatenate([above, equal])[:count]  # candidates are in a random order, so ties are too
        else:
            top = np.arange(len(total))
        return found.ids[top[np.argsort(-total[top], kind="stable")]]

    def observe(state: State, step: Step) -> State:
        state = grown(state, start, facts.size)
        results = results_of(step)
        before = look_up(state, memory, results.ids)
        after = {**note(state, memory, results), "pending": np.zeros(0, np.int32)}
        new: State = {}
        for number, machine in enumerate(machines):
            if machine.observe is not None:
                everything = lambda: look_up(after, memory, facts.order)  # noqa: E731
                one = machine.observe(own(state, number), results, before, everything)
                new |= {f"rule{number}_{name}": value for name, value in one.items()}
        return {**after, **new}

    def on_update(state: State, batch: Trajectories) -> State:
        for number, machine in enumerate(machines):
            if machine.on_update is not None:
                one = machine.on_update(own(state, number), batch)
                state = {**state, **{f"rule{number}_{name}": value for name, value in one.items()}}
        return state

    def columns(state: State, ids: Array) -> list[dict[str, Any]]:
        given = [machine.columns(own(state, i), ids) for i, machine in enumerate(machines) if machine.columns]
        return [{name: one for part in parts for name, one in part.items()} for parts in zip(*given, strict=True)]

    def counts(state: State, ids: Array, total: int) -> Array:
        random = np.random.default_rng([facts.seed, 2, state["draws"]])
        found = look_up(state, memory, np.asarray(ids, np.int64))
        (number,) = counters
        return np.asarray(machines[number].counts(own(state, number), found, total, random), np.int32)  # type: ignore[misc]

    def metrics(state: State) -> dict[str, float]:
        tried = int(np.count_nonzero(state["seen"] >= 0))
        last = state["rate"][state["seen"] == state["step"] - 1]
        out = {
            "curriculum/tried": tried / facts.size,
            "curriculum/solve_rate": float(np.mean(last)) if len(last) else float("nan"),
        }
        out |= {"curriculum/forced": float(state["forced"])} if state["forced"] else {}
        out |= left_out_metrics(left_out(state), reasons) if reasons else {}
        for number, machine in enumerate(machines):
            if machine.metrics is not None:
                out |= {f"curriculum/{name}": value for name, value in machine.metrics(own(state, number)).items()}
        return out

    return Curriculum(
        lambda: start, select, observe, counts if counters else None, metrics, left_out if reasons else None,
        columns=columns if any(machine.columns for machine in machines) else None, on_update=on_update,
    )  # fmt: skip


def _places(random: np.random.Generator, count: int, pool: int) -> Array:
    """At most `pool` distinct places below `count`, in a random order."""
    if count <= pool:
        return random.permutation(count)
    drawn = random.integers(0, count, pool)
    return drawn[np.sort(np.unique(drawn, return_index=True)[1])]


def _without(ids: Array, others: Array) -> Array:
    return ids[~np.isin(ids, others)] if len(others) else ids
