"""Rules of a curriculum that leave prompts out: stages, solved prompts that are dropped, phases of hard prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core.coefficients import check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.curriculum.budgets import apportion
from jaxrl_llm.curriculum.compose import Machine, RuleOf
from jaxrl_llm.curriculum.excluded import Why, where
from jaxrl_llm.curriculum.records import Array, PromptFacts, Prompts, State, changed
from jaxrl_llm.curriculum.scores import set_scores, sets_of
from jaxrl_llm.rollouts.runtime.group_results import Results
from jaxrl_llm.utils.errors import InputError, shown

GROUP_SIZES = (2, 4, 8)
_UNKNOWN, _TRIVIAL, _UNSOLVED, _LEFT_OUT = 0, 100, 101, 102  # classes of a profile beside the group sizes


@part
def staged(column: str, steps: int, earlier: float = 0.0, order: Sequence[Any] = ()) -> RuleOf:
    """Stages of `steps` steps each, one for each value of a column; the last stage lasts to the end of the run.

    Values are in ascending order, or in the `order` given. earlier: the share of prompts of earlier stages.
    Raises InputError where the order lacks a value of the column.
    """
    check_number("staged: steps", steps, least=1, whole=True)
    check_number("staged: earlier", earlier, least=0, below=1)

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

        def observe(state: State, results: Results, before: Prompts, everything: Any) -> State:
            return {"stage": stage(before.step + 1)}

        return Machine(
            {"stage": 0}, score, left_out, observe=observe, metrics=lambda state: {"stage": float(state["stage"])},
            reasons=(Why.LATER, Why.EARLIER) if earlier == 0 else (Why.LATER,),
        )  # fmt: skip

    return make


@part
def drop_solved(at: float = 1.0, visits: int = 1, back: int | None = None) -> RuleOf:
    """Drop prompts whose group has a mean reward of at least `at` in `visits` visits in a row.

    back: steps after which a dropped prompt is drawn again (None: never). If it is then not solved, it stays; the
    metric curriculum/returned counts those.
    """
    check_number("drop_solved: at", at, least=0, most=1)
    check_number("drop_solved: visits", visits, least=1, most=255, whole=True)
    check_number("drop_solved: back", back, least=1, whole=True, or_none=True)

    def left_out(state: State, prompts: Prompts) -> Array:
        since = state["since"][prompts.ids]
        out = since >= 0
        return where(Why.SOLVED, out if back is None else out & (prompts.step - since < back))

    def observe(state: State, results: Results, before: Prompts, everything: Any) -> State:
        ids = results.ids
        streak = np.where(results.mean >= at, np.minimum(state["streak"][ids].astype(np.int64) + 1, 255), 0)
        out, was = streak >= visits, state["since"][ids] >= 0
        return {
            "since": changed(state["since"], ids, np.where(out, before.step, -1)),
            "streak": changed(state["streak"], ids, streak),
            "returned": state["returned"] + int(np.sum(was & ~out)),
        }

    def make(facts: PromptFacts) -> Machine:
        start = {"since": np.full(facts.size, -1, np.int32), "streak": np.zeros(facts.size, np.uint8)}
        return Machine(
            {**start, "returned": 0}, left_out=left_out, observe=observe,
            metrics=lambda state: {"returned": float(state["returned"])}, reasons=(Why.SOLVED,),
        )  # fmt: skip

    return make


@part
def hardest_in_phases(first_steps: int, phases: Sequence[tuple[int, int]], times: int = 1) -> RuleOf:
    """All prompts for `first_steps` steps, then phases with the hardest ones only, each with `times` as many samples.

    phases: (n, steps) of each. A phase has those n prompts of the one before whose last group had the lowest mean
    reward; ties are broken at random, and prompts without a group come last. The last phase lasts to the end of the
    run. In phases a step has fewer prompts, so that the number of its samples stays.
    """
    check_number("hardest_in_phases: first_steps", first_steps, least=1, whole=True)
    check_number("hardest_in_phases: times", times, least=1, whole=True)
    for n, steps in phases:
        check_number("hardest_in_phases: the prompts of a phase", n, least=1, whole=True)
        check_number("hardest_in_phases: the steps of a phase", steps, least=1, whole=True)
    starts = np.cumsum([first_steps, *(steps for _, steps in phases)])[:-1] if phases else np.zeros(0, np.int64)

    def make(facts: PromptFacts) -> Machine:
        def observe(state: State, results: Results, before: Prompts, everything: Callable[[], Prompts]) -> State:
            phase = int(np.sum(before.step + 1 >= starts))
            if phase == state["phase"]:
                return {}
            every = everything()
            rate = np.where(np.isnan(every.rate), np.inf, every.rate)
            rate[~state["members"][every.ids]] = np.nan  # sorted behind all others
            ties = np.random.default_rng([facts.seed, 3, phase]).random(len(rate))
            hardest = every.ids[np.lexsort((ties, rate))][: phases[phase - 1][0]]
            members = np.zeros(facts.size, bool)
            members[hardest] = state["members"][hardest]
            return {"phase": phase, "members": members}

        def size(state: State, count: int) -> int:
            return count if state["phase"] == 0 else -(-count // times)

        return Machine(
            {"phase": 0, "members": np.ones(facts.size, bool)},
            left_out=lambda state, prompts: where(Why.EASIER, ~state["members"][prompts.ids]),
            size=size,
            counts=lambda state, prompts, total, random: apportion(np.ones(len(prompts.ids)), total),
            observe=observe,
            metrics=lambda state: {"phase": float(state["phase"]), "members": float(np.sum(state["members"]))},
            reasons=(Why.EASIER,),
        )

    return make


def profile_class(rate: Array, trivial: float) -> Array:
    """uint8[n]: the group size 2, 4 or 8 of prompts by success rate f64[n], or the class trivial or unsolved.

    The size is the largest power of two up to 1/rate, from 2 to 8. A rate above `trivial` is trivial, 0 unsolved.

    >>> profile_class(np.arange(9) / 8, 0.75).tolist()
    [101, 8, 4, 2, 2, 2, 2, 100, 100]
    """
    size = np.exp2(np.floor(np.log2(1 / np.maximum(rate, 1 / 64)) + 1e-9))
    sizes = np.clip(size, GROUP_SIZES[0], GROUP_SIZES[-1])
    return np.where(rate > trivial, _TRIVIAL, np.where(rate <= 0, _UNSOLVED, sizes)).astype(np.uint8)


@part
def sorted_by_profile(
    steps: int, column: str | None = None, samples: int = 8, trivial: float = 0.75, unsolved: float = 0.1
) -> RuleOf:
    """Group sizes by success rate before training, and the prompts of each size in turn, the easiest first.

    A profile gives each prompt a class, see `profile_class`. Trivial prompts are dropped, and all unsolved ones but a
    random share `unsolved`. Prompts with groups of 2 are trained on for `steps` steps, then those with groups of 4, and
    those with groups of 8 to the end of the run; the unsolved ones belong to each. Sizes without a prompt are skipped.
    Groups are smaller than the run's `samples`, so a step has more of them: prompts times samples stays.

    column: has the success rates, measured before the run; None: the first pass over the set measures them, with
    `samples` samples a prompt. Raises InputError for rates outside 0 to 1, and where the run's group_size is not
    `samples`.
    """
    check_number("sorted_by_profile: steps", steps, least=1, whole=True)
    check_number("sorted_by_profile: samples", samples, least=8, whole=True)
    check_number("sorted_by_profile: trivial", trivial, least=0, most=1)
    check_number("sorted_by_profile: unsolved", unsolved, least=0, most=1)
    if samples % GROUP_SIZES[-1]:
        raise InputError(f"sorted_by_profile: samples is {samples}, but must be a multiple of {GROUP_SIZES[-1]}")

    def make(facts: PromptFacts) -> Machine:
        chance = np.empty(facts.size)
        chance[facts.order] = np.random.default_rng([facts.seed, 4]).random(facts.size)

        def classes(ids: Array, rate: Array) -> Array:
            found = profile_class(rate, trivial)
            return np.where((found == _UNSOLVED) & (chance[ids] >= unsolved), _LEFT_OUT, found)

        def turn(classes: Array, size: int, least: int) -> int:
            """The group size of the first cluster with prompts, from `least` on; else `size`."""
            return next((G for G in GROUP_SIZES if least <= G and np.any(classes == G)), size)

        start: State = {"class": np.full(facts.size, _UNKNOWN, np.uint8), "size": 0, "left": 0}
        if column is not None:
            rates = facts.column(column)
            if wrong := [x for x in rates if isinstance(x, bool | str) or not 0 <= x <= 1]:
                raise InputError(f"the column {column!r} has {shown(wrong[0])}, but must have rates from 0 to 1")
            start["class"] = classes(np.arange(facts.size), np.asarray(rates, np.float64)).astype(np.uint8)
            start["size"], start["left"] = turn(start["class"], GROUP_SIZES[-1], 0), steps

        def left_out(state: State, prompts: Prompts) -> Array:
            mine, now = state["class"][prompts.ids], state["size"]
            if now == 0:  # the first pass; what is measured waits for it to end
                return where(Why.LATER, mine != _UNKNOWN)
            later = (mine == _UNKNOWN) | ((mine > now) & (mine < _TRIVIAL))
            why = where(Why.LATER, later) + where(Why.EARLIER, (mine < now) & ~later)
            return why + where(Why.SOLVED, mine == _TRIVIAL) + where(Why.UNSOLVED, mine == _LEFT_OUT)

        def observe(state: State, results: Results, before: Prompts, everything: Any) -> State:
            if state["size"] == 0:
                new = state["class"][results.ids] == _UNKNOWN
                ids = results.ids[new]
                known = changed(state["class"], ids, classes(ids, results.mean[new]))
                if np.any(known == _UNKNOWN):
                    return {"class": known}
                return {"class": known, "size": turn(known, GROUP_SIZES[-1], 0), "left": steps}
            if state["left"] > 1:
                return {"left": state["left"] - 1}
            return {"size": turn(state["class"], state["size"], state["size"] + 1), "left": steps}

        def size(state: State, count: int) -> int:
            return count * samples // state["size"] if state["size"] else count

        def counts(state: State, prompts: Prompts, total: int, random: np.random.Generator) -> Array:
            each = state["size"] or samples
            if total != len(prompts.ids) * each:
                raise InputError(f"this curriculum is for groups of {samples} samples: set group_size to {samples}")
            return np.full(len(prompts.ids), each)

        def metrics(state: State) -> dict[str, float]:
            return {"group_size": float(state["size"])}

        reasons = (Why.SOLVED, Why.UNSOLVED, Why.LATER, Why.EARLIER)
        return Machine(start, None, left_out, size, counts, observe, metrics, reasons)

    return make
