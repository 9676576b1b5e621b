"""Curricula over a prompt set: what is known of each prompt, and rules that say which prompts are drawn.

`choose_prompts` composes rules, each of which gives scores, leaves prompts out, or divides a step's samples. The rules
are in `scores`, `stages` and `budgets`.

Draws are made with a generator keyed on (seed, number of draws so far), over prompts in the order of their digests. A
resumed run therefore draws the same prompts, and another order of the rows draws the same prompts of the file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core.arguments.checks import require_function
from jaxrl_llm.core.arguments.ranges import Count, Fraction, NonNegative, check_number
from jaxrl_llm.core.repr import part
from jaxrl_llm.core.source import Curriculum, MakeCurriculum
from jaxrl_llm.curriculum.excluded import Why
from jaxrl_llm.curriculum.records import Array, Memory, Prompts, State, facts_of
from jaxrl_llm.curriculum.rules import RuleOf, Rules, curriculum_of

POOL = 65_536  # candidates of a draw


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
    of prompts that are left out, by the reason of the first rule that does. At most one gives counts, one sizes.
    """
    for rule in rules:
        require_function("a rule of a curriculum", rule)
    for number in prior:
        check_number("choose_prompts: prior", number, above=0)

    def make(rows: Sequence[Mapping[str, Any]], seed: int) -> Curriculum:
        facts = facts_of(rows, seed)
        own = Rules(facts, Memory(prior, kept, faded), [rule(facts) for rule in rules])
        return _by_score(own, noise, pool)

    return make


def _by_score(rules: Rules, noise: float, pool: int) -> Curriculum:
    facts = rules.facts

    def admitted(state: State, ids: Array) -> Prompts:
        found = rules.prompts(state, ids)
        allowed = rules.why(state, found) == Why.DRAWN
        return found if allowed.all() else rules.prompts(state, ids[allowed])

    def select(state: State, count: int) -> tuple[Array, State]:
        if count < 1:
            return np.zeros(0, np.int32), state
        random = np.random.default_rng([facts.seed, 1, state["draws"]])
        for _, size in rules.of("size", state):
            count = max(1, size(count))
        ids = facts.order[_places(random, facts.size, pool)]
        found = admitted(state, _without(ids, state["pending"]))
        if len(found.ids) < count and facts.size > pool:
            ids = facts.order[random.permutation(facts.size)]
            found = admitted(state, _without(ids, state["pending"]))
        chosen, forced = best(state, found, count, random), 0
        if len(chosen) < count:
            again = admitted(state, ids)
            forced = 0 if len(again.ids) else count - len(chosen)
            again = again if len(again.ids) else rules.prompts(state, ids)
            ranked = np.concatenate([chosen, np.setdiff1d(best(state, again, count, random), chosen)])
            chosen = np.resize(ranked, count)
        pending = np.concatenate([state["pending"], chosen.astype(np.int32)])
        after = {"draws": state["draws"] + 1, "forced": state["forced"] + forced, "pending": pending}
        return chosen.astype(np.int32), {**state, **after}

    def best(state: State, found: Prompts, count: int, random: np.random.Generator) -> Array:
        """The ids of at most `count` prompts with the largest scores, the largest first."""
        total = np.zeros(len(found.ids))
        for _, score in rules.of("score", state):
            total += score(found, random)
        if noise:
            total += noise * random.gumbel(size=len(total))
        if count < len(total):
            least = np.partition(total, len(total) - count)[len(total) - count]
            above, equal = np.flatnonzero(total > least), np.flatnonzero(total == least)
            top = np.concatenate([above, equal])[:count]  # candidates are in a random order, so ties are too
        else:
            top = np.arange(len(total))
        return found.ids[top[np.argsort(-total[top], kind="stable")]]

    def metrics(state: State) -> dict[str, float]:
        tried = int(np.count_nonzero(state["seen"] >= 0))
        last = state["rate"][state["seen"] == state["step"] - 1]
        out = {
            "curriculum/tried": tried / facts.size,
            "curriculum/solve_rate": float(np.mean(last)) if len(last) else float("nan"),
        }
        return out | ({"curriculum/forced": float(state["forced"])} if state["forced"] else {})

    none: Array = np.zeros(0, np.int32)
    start = {"draws": 0, "forced": 0, "pending": none}
    return curriculum_of(rules, start, select, metrics=metrics, observed={"pending": none})


def _places(random: np.random.Generator, count: int, pool: int) -> Array:
    """At most `pool` distinct places below `count`, in a random order."""
    if count <= pool:
        return random.permutation(count)
    drawn = random.integers(0, count, pool)
    return drawn[np.sort(np.unique(drawn, return_index=True)[1])]


def _without(ids: Array, others: Array) -> Array:
    return ids[~np.isin(ids, others)] if len(others) else ids
