"""`Episode`: one path of given and sampled tokens. Token ids are kept as they were sampled."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.errors import InputError, shown
from jaxrl_llm.sampling.requests import NO_TOKENS, Tokens


class Segment(NamedTuple):
    """Tokens that were sampled together (actions), or given together (conditioned on, masked out of the loss)."""

    tokens: Tokens
    sampled: bool


@dataclass(frozen=True)
class Episode:
    """A prompt and what followed it. Episodes are values: each method returns another one.

    >>> episode = Episode((5, 6), prompt_id=0, sample=1) + given([7, 8])
    >>> episode.tokens, episode.size
    ((5, 6, 7, 8), 2)
    """

    prompt: tuple[int, ...]
    prompt_id: int = 0
    """Row of the data set; names the randomness, with `sample`."""
    sample: int = 0
    """Number among the samples of the prompt."""
    segments: tuple[Segment, ...] = ()
    """After the prompt."""
    ended: bool = False
    """Whether the last sampled segment ended with a stop token or a stop string."""
    truncated: bool = False
    """Whether it ran out of its budget before its end."""
    reward: float | None = None
    """The combined reward; None: not scored yet. NaN: no reward function scored it."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Components of the reward by name."""
    info: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    """What the rollout knows of it and a method may need, by name."""

    def __add__(self, segment: Segment) -> Episode:
        """The episode with another segment. Observations are given, actions are what `tools.sample` adds."""
        if not isinstance(segment, Segment):
            raise InputError(
                f"an episode is continued by a segment, but found {shown(segment)}: use given(token ids), or "
                "tools.sample(episode)"
            )
        return replace(self, segments=(*self.segments, segment), ended=False)

    @property
    def size(self) -> int:
        """Tokens after the prompt."""
        return sum(segment.tokens.size for segment in self.segments)

    @property
    def own(self) -> Tokens:
        """The tokens after the prompt."""
        if len(self.segments) == 1:
            return self.segments[0].tokens
        parts = [segment.tokens for segment in self.segments] or [NO_TOKENS]
        return Tokens(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    @property
    def tokens(self) -> tuple[int, ...]:
        """All token ids."""
        return (*self.prompt, *self.own.token.tolist())

    @property
    def actions(self) -> np.ndarray:
        """bool[size]: which of the tokens after the prompt were sampled."""
        parts = [np.full(segment.tokens.size, segment.sampled) for segment in self.segments]
        return np.concatenate([np.zeros(0, bool), *parts])

    @property
    def turns(self) -> np.ndarray:
        """int32[size]: number of the turn of each sampled token, -1 of given ones. Given tokens separate turns."""
        turn, after_given, out = 0, False, [np.zeros(0, np.int32)]
        for segment in self.segments:
            if segment.sampled:
                turn, after_given = turn + after_given, False
                out.append(np.full(segment.tokens.size, turn, np.int32))
            else:
                # What is given before the first action does not make that another turn.
                after_given = after_given or any(s.sampled for s in self.segments[: len(out) - 1])
                out.append(np.full(segment.tokens.size, -1, np.int32))
        return np.concatenate(out)

    @property
    def last(self) -> tuple[int, ...]:
        """Token ids of the last sampled segment."""
        sampled = [segment for segment in self.segments if segment.sampled]
        return tuple(sampled[-1].tokens.token.tolist()) if sampled else ()

    def first(self, count: int) -> Episode:
        """Its first `count` tokens after the prompt, to fork another sample from. InputError out of range."""
        if not 0 <= count <= self.size:
            raise InputError(f"an episode with {self.size} tokens after its prompt has no first {count}")
        kept, left = [], count
        for segment in self.segments:
            if left > 0:
                kept.append(segment._replace(tokens=segment.tokens.first(left)))
            left -= segment.tokens.size
        return replace(
            self, segments=tuple(kept), ended=False, truncated=False, reward=None, rewards={}, info=dict(self.info)
        )

    def scored(self, reward: float, rewards: Mapping[str, float] | None = None) -> Episode:
        """The episode with its reward."""
        return replace(self, reward=float(reward), rewards=dict(rewards or {}))

    def with_info(self, **entries: float | Sequence[float]) -> Episode:
        """The episode with more entries in `info`."""
        return replace(self, info={**self.info, **entries})


def given(ids: Sequence[int], policy_step: int = 0) -> Segment:
    """A segment of tokens that nobody sampled: an observation, a hint, the start of a known solution."""
    token = np.asarray(list(ids), np.int32)
    zeros = np.zeros(token.shape, np.float32)
    floor = np.full(token.shape, -np.inf, np.float32)
    return Segment(Tokens(token, zeros, zeros, floor, zeros, np.full(token.shape, policy_step, np.int32)), False)


def digest(ids: Sequence[int] | np.ndarray) -> int:
    """A checksum of token ids, the same in every process."""
    return zlib.crc32(np.asarray(ids, np.int32).tobytes())


def info_columns(episodes: Sequence[Episode]) -> dict[str, Any]:
    """What rollouts said of their episodes, f32[N, ...] by name; NaN where one has no such entry.

    Raises InputError where entries of one name have different shapes.
    """
    columns: dict[str, Any] = {}
    for name in sorted({name for episode in episodes for name in episode.info}):
        known = {number: np.asarray(e.info[name], np.float32) for number, e in enumerate(episodes) if name in e.info}
        shapes = {value.shape for value in known.values()}
        if len(shapes) > 1:
            raise InputError(f"the rollout gives info {name!r} in several shapes, {shown(sorted(shapes))}: give one")
        columns[name] = np.full((len(episodes), *shapes.pop()), np.nan, np.float32)
        for number, value in known.items():
            columns[name][number] = value
    return columns
