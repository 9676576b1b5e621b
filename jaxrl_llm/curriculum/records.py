"""What a curriculum knows of a prompt set: its rows, and a record of how each prompt did, as arrays.

A record holds a Beta posterior of the success rate and the last group's result, 20 bytes a prompt. Functions return new
records and change none.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core.source import Step
from jaxrl_llm.utils.errors import InputError

State = dict[str, Any]
Array = np.ndarray[Any, Any]


class Results(NamedTuple):
    """The results of a step: n distinct prompts, ascending, each with the rewards of its samples."""

    ids: Array  # int64[n]
    samples: Array  # int64[n]: scored samples, at least 1
    mean: Array  # f64[n]: their mean reward, each reward clipped to [0, 1]
    best: Array  # f64[n]: their largest reward, clipped likewise


def mean_by_prompt(prompt_id: Array, values: Array) -> tuple[Array, Array, Array]:
    """(prompts int64[n], ascending; values of each that are not NaN, at least 1; their mean f64[n]) of rows."""
    known = ~np.isnan(values)
    ids, place = np.unique(np.asarray(prompt_id, np.int64)[known], return_inverse=True)
    count = np.bincount(place, minlength=len(ids))
    return ids, count, np.bincount(place, values[known], len(ids)) / np.maximum(count, 1)


def results_of(step: Step) -> Results:
    """The results of a step; rows without a score are ignored."""
    batch = step.scored.batch
    reward = np.clip(np.asarray(batch.need("reward"), np.float64), 0.0, 1.0)
    ids, samples, mean = mean_by_prompt(np.asarray(batch.prompt_id), reward)
    known, best = ~np.isnan(reward), np.zeros(len(ids))
    np.maximum.at(best, np.searchsorted(ids, np.asarray(batch.prompt_id)[known]), reward[known])
    return Results(ids, samples, mean, best)


class PromptFacts(NamedTuple):
    """A prompt set of P rows, as it is when a run starts."""

    rows: Sequence[Mapping[str, Any]]
    order: Array
    """int64[P]: the rows in the order of the digests of their prompts, which does not depend on their places."""
    seed: int

    @property
    def size(self) -> int:
        """P."""
        return len(self.order)

    @property
    def rank(self) -> Array:
        """int64[P]: the place of each row in `order`."""
        return np.argsort(self.order)

    def column(self, name: str) -> list[Any]:
        """The values of a column, of all rows. InputError where a row has none, and for rows read as they are drawn."""
        if not isinstance(self.rows, list | tuple):
            raise InputError(
                f"the curriculum reads the column {name!r} of every prompt, but prompts are read as they are drawn: "
                "use fewer prompts, or a file that is loaded as a whole"
            )
        missing = [number for number, row in enumerate(self.rows, start=1) if row.get(name) is None]
        if missing:
            raise InputError(
                f"the curriculum reads the column {name!r}, which {len(missing)} of {self.size} prompts do not have, "
                f"the first of them prompt {missing[0]}: add it, or name another column"
            )
        return [row[name] for row in self.rows]


def prompt_facts(rows: Sequence[Mapping[str, Any]], seed: int) -> PromptFacts:
    """The facts of rows. Rows that are read as they are drawn keep their order, because none of them is read here."""
    if not isinstance(rows, list | tuple):
        return PromptFacts(rows, np.arange(len(rows)), seed)
    digests = np.fromiter((_digest(row) for row in rows), np.uint64, len(rows))
    return PromptFacts(rows, np.argsort(digests, kind="stable"), seed)


def _digest(row: Mapping[str, Any]) -> int:
    prompt = row.get("prompt", "")
    text = prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


class Memory(NamedTuple):
    """How a record remembers.

    prior: (alpha, beta) of an untried prompt. kept: the share of its counts that a prompt keeps when it is tried.
    faded: the share of their distance from the prior that the counts of the others keep in each step.
    """

    prior: tuple[float, float] = (1.0, 1.0)
    kept: float = 1.0
    faded: float = 1.0


class Prompts(NamedTuple):
    """Some prompts, n of them, and what is known of each now."""

    ids: Array  # int64[n]
    alpha: Array  # f64[n], of the Beta posterior of the success rate
    beta: Array  # f64[n]
    rate: Array  # f64[n]: mean reward of its last group, within 0 and 1; NaN before
    tries: Array  # int64[n]: steps in which it was tried
    seen: Array  # int64[n]: the last step in which it was tried; -1 before
    step: int  # steps observed so far

    @property
    def value(self) -> Array:
        """f64[n]: the mean of the posterior."""
        return self.alpha / (self.alpha + self.beta)


def start_record(count: int, memory: Memory) -> State:
    """The record of `count` untried prompts."""
    return {
        "step": 0,
        "alpha": np.full(count, memory.prior[0], np.float32),
        "beta": np.full(count, memory.prior[1], np.float32),
        "rate": np.full(count, np.nan, np.float32),
        "tries": np.zeros(count, np.int32),
        "seen": np.full(count, -1, np.int32),
    }


def grown(state: State, start: State, count: int) -> State:
    """The state for a prompt set that has grown to `count` rows; new ones are as in `start`.

    Raises InputError if the set has become smaller.
    """
    had = len(state["alpha"])
    if had == count:
        return state
    if had > count:
        raise InputError(
            f"the curriculum's state is of {had} prompts, but the set has {count}: continue with the prompts of the run"
        )
    new = {
        name: np.concatenate([state[name], one[had:]])
        for name, one in start.items()
        if isinstance(one, np.ndarray) and len(one) == count and len(state[name]) == had
    }
    return {**state, **new}


def look_up(state: State, memory: Memory, ids: Array) -> Prompts:
    """What a record says of some prompts."""
    seen, step = state["seen"][ids].astype(np.int64), int(state["step"])
    alpha, beta = (state[name][ids].astype(np.float64) for name in ("alpha", "beta"))
    if memory.faded < 1:
        left = memory.faded ** np.where(seen < 0, 0, step - 1 - seen)
        alpha, beta = (p + left * (x - p) for p, x in zip(memory.prior, (alpha, beta), strict=True))
    rate, tries = state["rate"][ids].astype(np.float64), state["tries"][ids].astype(np.int64)
    return Prompts(np.asarray(ids, np.int64), alpha, beta, rate, tries, seen, step)


def note(state: State, memory: Memory, results: Results) -> State:
    """The record after a step with these results: alpha <- kept alpha + successes, and beta alike with failures."""
    ids, step = results.ids, int(state["step"])
    before = look_up(state, memory, ids)
    won = results.mean * results.samples
    values = {
        "alpha": memory.kept * before.alpha + won,
        "beta": memory.kept * before.beta + results.samples - won,
        "rate": results.mean,
        "tries": before.tries + 1,
        "seen": step,
    }
    return {**state, **{name: changed(state[name], ids, value) for name, value in values.items()}, "step": step + 1}


def changed(array: Array, ids: Array, values: Any) -> Array:
    """A copy of an array with other values at some places."""
    new = array.copy()
    new[ids] = values
    return new
