"""Curricula over a prompt set: what is known of each prompt, and rules that say which prompts are drawn.

`choose_prompts` composes rules, each of which gives scores, leaves prompts out, or divides a step's samples. The rules
are in `scores` and `budgets`. `in_epochs` goes through all prompts in turn, without those that rules leave
out, and `hard_buffer` asks hard ones again.

Draws are made with a generator keyed on (seed, number of draws so far), over prompts in the order of their digests. A
resumed run therefore draws the same prompts, and another order of the rows draws the same prompts of the file.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core.arguments.checks import require_function
from jaxrl_llm.core.arguments.ranges import Count, Fraction, NonNegative, Positive
from jaxrl_llm.core.parts import Trajectories, part, step_part
from jaxrl_llm.core.source import Curriculum, MakeCurriculum, Step
from jaxrl_llm.curriculum.excluded import Why
from jaxrl_llm.curriculum.records import Array, Memory, Prompts, State, prompt_facts
from jaxrl_llm.curriculum.rules import RuleOf, Rules, curriculum_of
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs
from jaxrl_llm.utils.errors import InputError

POOL = 65_536  # candidates of a draw


@part
def choose_prompts(
    *rules: RuleOf,
    noise: NonNegative = 1.0,
    prior: tuple[Positive, Positive] = (1.0, 1.0),
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

    def make(rows: Sequence[Mapping[str, Any]], seed: int) -> Curriculum:
        facts = prompt_facts(rows, seed)
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
        stream, facts = shuffled_epochs(rows, seed), prompt_facts(rows, seed)
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


Score = Callable[[Trajectories], Any]  # batch -> f32[N]


def solved_by(step: Step, score: Score | None = None) -> dict[int, float]:
    """The mean reward of each prompt's samples, in the order of the batch, without those of second prompts.

    score: of the rows f32[N]; None: the run's reward.
    """
    batch = step.scored.batch
    ids, reward = np.asarray(batch.prompt_id), np.asarray(batch.need("reward"), np.float64)
    if score is not None:
        reward = np.asarray(score(batch), np.float64)
    part = (batch.info or {}).get("part")
    counts = ~np.isnan(reward)
    if part is not None:
        counts &= ~(np.asarray(part) > 0)
    return {int(i): float(reward[counts & (ids == i)].mean()) for i in dict.fromkeys(ids[counts].tolist())}


@step_part
def hard_buffer(
    rows: Sequence[dict[str, Any]],
    seed: int,
    share: NonNegative = 0.25,
    threshold: float = 0.5,
    most: Count = 10_000,
    every: Count = 1,
    score: Score | None = None,
) -> Curriculum:
    """Shuffled epochs, and `share` times as many problems from a buffer of those with a mean reward below `threshold`.

    A problem enters the buffer when its mean reward is below the threshold, and leaves it when it is not. Beyond `most`
    problems, the one that has been in it for longest leaves. Problems are drawn from it uniformly and without
    replacement; where it has too few, new ones of the epoch take their places. every: draw from it every so many times
    only. score: of the rows f32[N] of a batch, instead of the reward. The metrics curriculum/buffer and
    curriculum/replayed are its size, and the problems that the last step took from it.
    """
    stream = shuffled_epochs(rows, seed)

    def select(state: State, count: int) -> tuple[np.ndarray, State]:
        due = state["drawn"] % every == every - 1
        wanted = min(int(count * share / (1 + share) + 0.5), len(state["buffer"])) if due else 0
        new, after = stream.select(state["stream"], count - wanted)
        free = [i for i in state["buffer"] if i not in set(new.tolist())]
        if len(free) < wanted:  # problems that the epoch asks now anyway
            more, after = stream.select(after, wanted - len(free))
            new = np.concatenate([new, more])
            wanted = len(free)
        random = np.random.default_rng([seed, state["drawn"]])
        old = random.choice(np.asarray(free, np.int32), wanted, replace=False)
        state = {**state, "stream": after, "drawn": state["drawn"] + (count > 0), "replayed": wanted}
        return np.concatenate([new, old]).astype(np.int32), state

    def observe(state: State, step: Step) -> State:
        solved = solved_by(step, score)
        kept = [i for i in state["buffer"] if solved.get(i, -np.inf) < threshold]
        hard = [i for i, rate in solved.items() if rate < threshold and i not in set(kept)]
        return {**state, "buffer": [*kept, *hard][-most:]}

    def metrics(state: State) -> dict[str, float]:
        return {"curriculum/buffer": float(len(state["buffer"])), "curriculum/replayed": float(state["replayed"])}

    return Curriculum(
        lambda: {"stream": stream.init(), "buffer": [], "drawn": 0, "replayed": 0}, select, observe, metrics=metrics
    )
