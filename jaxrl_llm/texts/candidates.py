"""Candidate texts with their statistics, the state of a method, and rules of selection: all of them values."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxrl_llm.utils.errors import InputError, shown
from jaxrl_llm.utils.words import cosine, words


@dataclass(frozen=True)
class Candidate:
    """A text, and what is known of it.

    total: the sum of its rewards; count: the number of them. feedback: the latest notes on answers given with it.
    """

    text: str
    total: float = 0.0
    count: int = 0
    feedback: tuple[str, ...] = ()

    @property
    def mean(self) -> float:
        """The mean reward; 0 before the first one."""
        return self.total / self.count if self.count else 0.0


@dataclass(frozen=True)
class Experience:
    """A lesson, or an example of an answer, that texts are composed of. weight: its reward; uses: in how many texts."""

    text: str
    weight: float = 0.0
    uses: int = 0


@dataclass(frozen=True)
class State:
    """All that a method knows between two steps. first: the text that the run began with."""

    first: str
    candidates: tuple[Candidate, ...] = ()
    experiences: tuple[Experience, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The state as a JSON object."""
        return dataclasses.asdict(self)


def state_of_json(raw: Any) -> State:
    """The state from `State.as_json`; InputError for anything else."""
    try:
        found = [Candidate(**{**one, "feedback": tuple(one["feedback"])}) for one in raw["candidates"]]
        return State(str(raw["first"]), tuple(found), tuple(Experience(**one) for one in raw["experiences"]))
    except (TypeError, KeyError):
        raise InputError(f"the state of the texts is {shown(raw)}, which is damaged: begin a new run") from None


def observed(candidate: Candidate, rewards: Iterable[float], feedback: Sequence[str] = (), keep: int = 8) -> Candidate:
    """The candidate with further rewards, of which NaN are left out, and with the last `keep` notes."""
    known = [float(one) for one in rewards if not math.isnan(one)]
    notes = (*candidate.feedback, *feedback)[-keep:] if keep else ()
    return Candidate(candidate.text, candidate.total + sum(known), candidate.count + len(known), notes)


def replaced(memory: Sequence[Candidate], new: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """The memory with candidates replaced by those of the same text; the others are added at its end."""
    by_text = {one.text: one for one in memory}
    return tuple({**by_text, **{one.text: one for one in new}}.values())


def top(memory: Sequence[Candidate], count: int) -> tuple[Candidate, ...]:
    """The `count` candidates of the largest mean reward, the largest first; of equal ones the older."""
    return tuple(sorted(memory, key=lambda one: -one.mean)[:count])


def initial_state(text: str) -> State:
    """The state of a run that begins with a text, which has not been tried."""
    return State(text, (Candidate(text),))


def softmax(weights: Sequence[float], temperature: float = 1.0) -> np.ndarray:
    """f64[N]: probabilities proportional to exp(weight / temperature).

    >>> softmax([0.2, 0.5, 0.4]).round(6).tolist()
    [0.280013, 0.377978, 0.342009]
    """
    scaled = np.asarray(weights, np.float64) / temperature
    found = np.exp(scaled - scaled.max())
    return found / found.sum()


def draw_places(random: np.random.Generator, probabilities: np.ndarray, count: int) -> list[int]:
    """`count` different places (fewer where fewer have a probability), in the order in which they are drawn."""
    there = int(np.count_nonzero(probabilities))
    return (
        random.choice(len(probabilities), min(count, there), replace=False, p=probabilities).tolist() if there else []
    )


def distance(one: str, other: str) -> float:
    """How far apart two texts are, 0 to 1: 1 - cosine of the counts of their words, in small letters.

    >>> distance("Add the numbers.", "add the digits"), distance("a", "b")
    (0.33333333333333337, 1.0)
    """
    a, b = (Counter(words(text.strip(" ."))) for text in (one, other))
    return max(1.0 - cosine(a, b), 0.0) if a and b else float(one.split() != other.split())


def apart(texts: Iterable[str], known: Iterable[str], epsilon: float) -> list[str]:
    """An epsilon-net: the texts that are further than `epsilon` from all known ones and from those kept before them."""
    net, kept = list(known), list[str]()
    for text in texts:
        if all(distance(text, one) > epsilon for one in net):
            net.append(text)
            kept.append(text)
    return kept
