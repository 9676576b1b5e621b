"""Logs of running programs. A log holds the answers so far; a program that is rerun from its log resumes there."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.rollouts.episode import Segment
from jaxrl_llm.sampling.requests import NO_TOKENS, Tokens, concatenate_tokens


class CallKey(NamedTuple):
    """The identity of a call of `tools.sample` within a group."""

    number: int  # sample number
    place: int  # number of tokens between the prompt and the call
    context: int  # checksum of all tokens before the call


class PartialSample(NamedTuple):
    """The tokens that a call of `tools.sample` has drawn so far."""

    tokens: Tokens = NO_TOKENS
    ended: bool = False  # by a stop token or a stop string
    before: np.ndarray | None = None  # see `Segment`

    @property
    def segment(self) -> Segment:
        """These tokens as a segment of an episode."""
        return Segment(self.tokens, True, self.before)


class GroupLog(NamedTuple):
    """A group's task and the answers that its program has received. Immutable."""

    prompt: tuple[int, ...]
    prompt_id: int  # row of the data set
    samples: int
    first_step: int  # training step in which it started
    drawn: Mapping[CallKey, PartialSample] = {}
    recorded: Mapping[str, Any] = {}  # scores and answers of external calls, JSON values by name
    repeat: int = 0  # number among the groups of the prompt that started in this step

    @property
    def key(self) -> GroupKey:
        """What tells the group from all others of the run."""
        return GroupKey(self.prompt_id, self.first_step, self.repeat)


Pool = tuple[GroupLog, ...]


class GroupKey(NamedTuple):
    """See `GroupLog.key`."""

    prompt_id: int
    first_step: int
    repeat: int


class Held(NamedTuple):
    """What the program of a group that a step left unfinished holds, such as environments; no checkpoint has it."""

    recorded: Mapping[str, Any]  # of its log, whose answers these objects have given
    objects: dict[str, Any]  # by name

    def taken(self) -> dict[str, Any]:
        """The objects, once: whoever goes on with them changes them, so that nobody can do so again from here."""
        objects = dict(self.objects)
        self.objects.clear()
        return objects


def to_arrays(pool: Pool) -> dict[str, np.ndarray]:
    """The pool as flat arrays, for a checkpoint. `from_arrays` restores it bit for bit."""
    answers = [answer for log in pool for answer in log.drawn.values()]
    calls = [call for log in pool for call in log.drawn]
    tokens = concatenate_tokens([answer.tokens for answer in answers] or [NO_TOKENS])
    columns = {name: x for name, x in tokens._asdict().items() if x is not None}
    before = {} if tokens.experts is None else _before(answers)
    recorded = json.dumps([dict(log.recorded) for log in pool]).encode()
    numbers: dict[str, Sequence[int]] = {
        "prompt_length": [len(log.prompt) for log in pool],
        **{name: [getattr(log, name) for log in pool] for name in ("prompt_id", "samples", "first_step", "repeat")},
        "calls": [len(log.drawn) for log in pool],
        **{name: [getattr(call, name) for call in calls] for name in CallKey._fields},
        "length": [answer.tokens.size for answer in answers],
        "ended": [int(answer.ended) for answer in answers],
    }
    return {
        **{name: np.asarray(values, np.int64) for name, values in numbers.items()},
        "prompt": np.concatenate([np.asarray(log.prompt, np.int32) for log in pool] or [np.zeros(0, np.int32)]),
        "recorded": np.frombuffer(recorded, np.uint8).copy(),
        **columns,
        **before,
    }


def _before(answers: Sequence[PartialSample]) -> dict[str, np.ndarray]:
    """The `before` of answers as arrays: one after another, and the length of each, -1 where it has none."""
    known = [answer.before for answer in answers if answer.before is not None]
    if not known:
        return {}
    lengths = [-1 if answer.before is None else len(answer.before) for answer in answers]
    return {"before": np.concatenate(known), "before_length": np.asarray(lengths, np.int64)}


def from_arrays(arrays: Mapping[str, np.ndarray]) -> Pool:
    """The inverse of `to_arrays`; an empty pool for no arrays."""
    if not arrays:
        return ()
    ends, repeats = np.cumsum(arrays["length"]), arrays.get("repeat", np.zeros(len(arrays["calls"]), np.int64))
    before = arrays.get("before_length", np.full(len(ends), -1))
    until = np.cumsum(np.maximum(before, 0))
    everything = Tokens(*(arrays.get(name) for name in Tokens._fields))  # type: ignore[arg-type]
    answers = [
        PartialSample(
            Tokens(*(None if x is None else np.array(x[end - length : end]) for x in everything)),  # type: ignore[arg-type]
            bool(ended), None if size < 0 else np.array(arrays["before"][stop - size : stop]),
        )
        for end, length, ended, size, stop in zip(ends, arrays["length"], arrays["ended"], before, until, strict=True)
    ]  # fmt: skip
    names = zip(*(arrays[name].tolist() for name in CallKey._fields), strict=True)
    calls = [CallKey(*numbers) for numbers in names]
    recorded = json.loads(bytes(arrays["recorded"]))
    pool, prompt, first = [], 0, 0
    for i, (length, count) in enumerate(zip(arrays["prompt_length"], arrays["calls"], strict=True)):
        ids = tuple(arrays["prompt"][prompt : prompt + length].tolist())
        drawn = dict(zip(calls[first : first + count], answers[first : first + count], strict=True))
        row, samples, step = (int(arrays[name][i]) for name in ("prompt_id", "samples", "first_step"))
        pool.append(GroupLog(ids, row, samples, step, drawn, recorded[i], int(repeats[i])))
        prompt, first = prompt + length, first + count
    return tuple(pool)
