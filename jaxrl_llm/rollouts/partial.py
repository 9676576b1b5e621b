"""Partial rollouts: a step ends before its longest completions do, and they go on in the next.

A strategy works on a pool, a tuple of groups that were begun, oldest first, and knows nothing of models: `generate`
is the engine, or anything that completes requests as it does. Groups are values; nothing here is changed in place.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.coefficients import check_number
from jaxrl_llm.errors import InputError
from jaxrl_llm.sampling.requests import NO_TOKENS, Completion, Request, Tokens

Enough = Callable[[Completion], bool]  # called with each completion that ends; True: stop, give the others unfinished
Generate = Callable[[Sequence[Request], Enough], Iterable[Completion]]


class Sample(NamedTuple):
    """One completion of a group, as far as it is. Tokens keep the step of the weights that drew them."""

    tokens: Tokens = NO_TOKENS
    ended: bool = False  # by a stop token or a stop string


class Group(NamedTuple):
    """A prompt and its samples."""

    prompt: tuple[int, ...]
    prompt_id: int  # its row in the data set
    first_step: int  # in which it was begun
    samples: tuple[Sample, ...]

    def unfinished(self, limit: int) -> int:
        """How many of its samples neither ended nor have `limit` tokens."""
        return sum(not sample.ended and sample.tokens.size < limit for sample in self.samples)


Pool = tuple[Group, ...]


@dataclass(frozen=True)
class Partial:
    """When a step's rollout stops, and what becomes of completions that are not done by then.

    oversample: groups in flight, as a multiple (1 or more) of those that a step trains on. The step stops when that
    many groups are complete: the longest completions do not hold up the others (APRIL).
    segment_tokens: where not 0, the step stops instead when each completion in flight has so many new tokens, or is
    done, and trains on the groups that are complete by then, which may be fewer than wanted (UloRL).
    train_unfinished: the step trains on every completion in flight, also on those that are not done, whose newest
    tokens are a window of a longer completion (T-PPO). As many groups are in flight as a step trains on; those with a
    completion that is not done stay, the others make room for new prompts.

    The number in flight, ceil(oversample * wanted), bounds the pool: what it holds comes first, and only the rest is
    new prompts. With segments a group is complete after at most S = ceil(limit / segment_tokens) steps, so that an
    `oversample` of S gives every step from the S-th on all the groups that are wanted.

    Raises InputError for a number out of its range, and for more groups in flight than are trained on where all are.
    """

    oversample: float = 1.0
    segment_tokens: int = 0
    train_unfinished: bool = False

    def __post_init__(self) -> None:
        check_number("oversample", self.oversample, least=1, most=1024)
        check_number("segment_tokens", self.segment_tokens, least=0, most=2**31 - 1, whole=True)
        if self.train_unfinished and self.oversample > 1:
            raise InputError(
                f"oversample is {self.oversample}, but each step trains on all that is in flight, finished or not: "
                "leave it at 1"
            )

    def in_flight(self, wanted: int) -> int:
        """Groups in flight in a step that wants `wanted` complete ones."""
        return math.ceil(self.oversample * wanted - 1e-9)  # 1.1 * 10 is a little more than 11


class Advanced(NamedTuple):
    """What became of the groups in flight: each is in one of the two, in the order of the flight."""

    complete: Pool
    pool: Pool


def begin(prompts: Iterable[tuple[Sequence[int], int]], samples: int, step: int) -> Pool:
    """New groups of `samples` samples without tokens, of prompts (token ids, row in the data set)."""
    return tuple(Group(tuple(map(int, ids)), int(row), step, (Sample(),) * samples) for ids, row in prompts)


def requests_for(flight: Pool, limit: int, segment_tokens: int = 0) -> tuple[list[Request], list[tuple[int, int]]]:
    """A request for each unfinished sample, and which (group, sample) it is of.

    Two groups of one prompt have other sample numbers, so other randomness, as long as both are in flight.
    """
    requests, places, seen = [], [], Counter[int]()
    for number, group in enumerate(flight):
        first = seen[group.prompt_id]
        seen[group.prompt_id] += len(group.samples)
        for i, (tokens, ended) in enumerate(group.samples):
            if ended or tokens.size >= limit:
                continue
            pause = tokens.size + segment_tokens if segment_tokens else None
            requests.append(Request(group.prompt, limit, group.prompt_id, first + i, tokens, pause))
            places.append((number, i))
    return requests, places


def advance(
    flight: Pool,
    wanted: int,
    limit: int,
    generate: Generate,
    *,
    segment_tokens: int = 0,
    on_group: Callable[[int, Group], None] | None = None,
) -> Advanced:
    """Sample until `wanted` (at least 1) groups are complete; with segments, until all had theirs and one is complete.

    Complete are the groups that were so at the start, oldest first, and then those that become so first; the others,
    and complete ones beyond `wanted`, are the pool. limit: tokens of a completion at most. `generate` may be called
    more than once, where no group is complete after a segment, and not at all, where nothing is left to sample.
    on_group: called with the place in the flight of each group that will be in `complete`, and the group, at once.

    Raises InputError where `generate` leaves out a request or gives one twice: no sample is lost or doubled. Where it
    stops of its own accord, nothing may be complete.
    """
    state = _Flight(flight, wanted, limit, on_group)
    while segment_tokens or len(state.complete) < wanted:
        requests, state.places = requests_for(tuple(state.groups), limit, segment_tokens)
        if not requests:
            break
        state.take_all(requests, generate, never if segment_tokens else state.enough)
        if state.complete or not segment_tokens:
            break
    chosen = set(state.complete)
    return Advanced(
        tuple(group for number, group in enumerate(state.groups) if number in chosen),
        tuple(group for number, group in enumerate(state.groups) if number not in chosen),
    )


def advance_all(flight: Pool, limit: int, generate: Generate, segment_tokens: int = 0) -> Pool:
    """The flight, in its order, after one segment: each sample that was not done has `segment_tokens` more, or is done.

    Without segments (0) all are done. Raises InputError as `advance` does.
    """
    state = _Flight(flight, 0, limit, None)
    requests, state.places = requests_for(flight, limit, segment_tokens)
    if requests:
        state.take_all(requests, generate, never)
    return tuple(state.groups)


def never(completion: Completion) -> bool:
    """There are never enough: no reason to stop."""
    return False


class _Flight:
    """The groups of a call of `advance` or `advance_all`, as they are by now."""

    def __init__(self, groups: Pool, wanted: int, limit: int, on_group: Callable[[int, Group], None] | None) -> None:
        self.groups, self.wanted, self.limit, self.on_group = list(groups), wanted, limit, on_group
        self.places: list[tuple[int, int]] = []  # (group, sample) of each request
        self.complete: list[int] = []  # numbers of groups, at most `wanted`
        for number in range(len(groups)):
            self._note(number)

    def enough(self, completion: Completion) -> bool:
        """Whether enough groups are complete with this completion, which was not taken yet."""
        if len(self.complete) >= self.wanted:
            return True
        number, _ = self.places[completion.index]
        last = not completion.unfinished and self.groups[number].unfinished(self.limit) == 1
        return len(self.complete) + last >= self.wanted

    def take_all(self, requests: list[Request], generate: Generate, enough: Enough) -> None:
        """Sample for the requests, which are those of `places`; each must come back once."""
        left = set(range(len(requests)))
        for completion in generate(requests, enough):
            if completion.index not in left:
                raise InputError(f"the sampler gave request {completion.index} twice")
            left.remove(completion.index)
            self.take(completion)
        if left:
            raise InputError(f"the sampler did not give back {len(left)} of {len(requests)} requests")

    def take(self, completion: Completion) -> None:
        """Put a completion where it belongs."""
        number, i = self.places[completion.index]
        samples = list(self.groups[number].samples)
        samples[i] = Sample(completion.tokens, completion.ended)
        self.groups[number] = self.groups[number]._replace(samples=tuple(samples))
        self._note(number)

    def _note(self, number: int) -> None:
        if self.groups[number].unfinished(self.limit) or len(self.complete) >= self.wanted:
            return
        self.complete.append(number)
        if self.on_group is not None:
            self.on_group(number, self.groups[number])


def completions_of(groups: Pool, limit: int) -> tuple[list[Request], list[Completion], list[int]]:
    """The samples of groups as `sampler.assemble` takes them: requests, completions and the group of each."""
    requests: list[Request] = []
    completions: list[Completion] = []
    numbers: list[int] = []
    for number, group in enumerate(groups):
        for i, (tokens, ended) in enumerate(group.samples):
            completions.append(Completion(len(requests), tokens, ended, limit))
            requests.append(Request(group.prompt, limit, group.prompt_id, i))
            numbers.append(number)
    return requests, completions, numbers


def to_arrays(pool: Pool) -> dict[str, np.ndarray]:
    """The pool as flat arrays, for a checkpoint; `from_arrays` makes it again, bit by bit."""
    samples = [sample for group in pool for sample in group.samples]
    tokens = [sample.tokens for sample in samples] or [NO_TOKENS]
    prompts = [np.asarray(group.prompt, np.int32) for group in pool] or [np.zeros(0, np.int32)]
    arrays: dict[str, Any] = {
        "prompt": np.concatenate(prompts),
        "prompt_length": [len(group.prompt) for group in pool],
        "prompt_id": [group.prompt_id for group in pool],
        "first_step": [group.first_step for group in pool],
        "samples": [len(group.samples) for group in pool],
        "length": [sample.tokens.size for sample in samples],
        "ended": [int(sample.ended) for sample in samples],
        **{name: np.concatenate([getattr(part, name) for part in tokens]) for name in Tokens._fields},
    }
    return {name: x if isinstance(x, np.ndarray) else np.asarray(x, np.int32) for name, x in arrays.items()}


def from_arrays(arrays: dict[str, np.ndarray]) -> Pool:
    """The pool that `to_arrays` was given; the empty one for no arrays."""
    if not arrays:
        return ()
    ends = np.cumsum(arrays["length"])
    fields = [arrays[name] for name in Tokens._fields]
    samples = [
        Sample(Tokens(*(np.array(x[end - length : end]) for x in fields)), bool(ended))
        for end, length, ended in zip(ends, arrays["length"], arrays["ended"], strict=True)
    ]
    groups, prompt, sample = [], 0, 0
    for i, (length, count) in enumerate(zip(arrays["prompt_length"], arrays["samples"], strict=True)):
        ids = tuple(arrays["prompt"][prompt : prompt + length].tolist())
        row, step = int(arrays["prompt_id"][i]), int(arrays["first_step"][i])
        groups.append(Group(ids, row, step, tuple(samples[sample : sample + count])))
        prompt, sample = prompt + length, sample + count
    return tuple(groups)
