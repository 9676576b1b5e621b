"""`Episode`: one sequence of given and sampled tokens. Sampled token ids are kept and never re-encoded."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.models.layers.moe import NOT_RECORDED
from jaxrl_llm.sampling.requests import NO_TOKENS, Tokens, concatenate_tokens
from jaxrl_llm.sampling.routed_experts import in_order, pad_experts
from jaxrl_llm.utils.errors import InputError, shown


class Segment(NamedTuple):
    """Consecutive tokens that were sampled (actions) or given (conditioned on, masked out of the loss)."""

    tokens: Tokens
    sampled: bool
    before: np.ndarray | None = None  # int[m, layers, k], experts of the first m tokens of its context, where recorded

    def elsewhere(self) -> Segment:
        """The segment after other tokens, where what top-k, top-p and min-p kept, and its experts, are not known."""
        unknown = self.tokens._replace(floor=np.full_like(self.tokens.floor, -np.inf), experts=None)
        return self._replace(tokens=unknown, before=None)


@dataclass(frozen=True)
class Episode:
    """A prompt and the tokens after it. Episodes are immutable: methods return new ones.

    >>> episode = Episode((5, 6), prompt_id=0, sample=1) + given([7, 8])
    >>> episode.tokens, episode.size
    ((5, 6, 7, 8), 2)
    """

    prompt: tuple[int, ...]
    prompt_id: int = 0
    """Row of the data set; keys the noise together with `sample`."""
    sample: int = 0
    """Number among the samples of the prompt."""
    segments: tuple[Segment, ...] = ()
    """After the prompt."""
    ended: bool = False
    """Whether the last sampled segment ended with a stop token or a stop string."""
    truncated: bool = False
    """Whether it reached its token limit without ending."""
    reward: float | None = None
    """The combined reward; None: not scored yet; NaN: no reward function scored it."""
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Components of the reward by name."""
    info: Mapping[str, float | Sequence[float]] = field(default_factory=dict)
    """Further values that the rollout provides to methods, by name."""
    entries: Mapping[str, Any] = field(default_factory=dict)
    """What reward functions returned beside their scores, such as the answer's key, by name; see `rewards.entries`."""
    talk: Any = field(default=None, compare=False, repr=False)
    """The conversation, as reward functions see it, `rewards.seen.Talk`; None: they see the sampled text."""
    part: int = 0
    """Number of the episode's group, where a program returns several groups of one task, each with its own baseline."""
    trained_prompt: tuple[int, ...] | None = None
    """Prompt of the row that is trained on, if it is not the one that the episode was sampled under."""
    turn_rewards: tuple[float, ...] = ()
    """Rewards of its turns, beside `reward`; the batch's `turn_rewards`."""
    state_keys: tuple[int, ...] = ()
    """Keys of the environment's states before its turns, 0 to 2^32 - 1; the batch's `state_key`."""
    teacher_prompt: tuple[int, ...] | None = None
    """Another prompt, under which a teacher reads the episode's tokens; () for none, where others have one."""
    answer: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Tokens that open the reference answer of the row, and those of the answer; ((), ()) for none."""

    def __add__(self, segment: Segment) -> Episode:
        """Append a segment, such as an observation made by `given`. Actions are appended by `tools.sample`."""
        if not isinstance(segment, Segment):
            raise InputError(
                f"only a segment can be added to an episode, but found {shown(segment)}: use given(token ids), or "
                "tools.sample(episode)"
            )
        return replace(self, segments=(*self.segments, segment), ended=False)

    @property
    def score(self) -> float:
        """The reward, NaN (not scored) without one."""
        return float("nan") if self.reward is None else self.reward

    @property
    def size(self) -> int:
        """Number of tokens after the prompt."""
        return sum(segment.tokens.size for segment in self.segments)

    @property
    def own(self) -> Tokens:
        """The tokens after the prompt."""
        if len(self.segments) == 1:
            return self.segments[0].tokens
        return concatenate_tokens([segment.tokens for segment in self.segments] or [NO_TOKENS])

    @property
    def tokens(self) -> tuple[int, ...]:
        """All token ids, including the prompt."""
        return (*self.prompt, *self.own.token.tolist())

    @property
    def experts(self) -> np.ndarray | None:
        """int[len(prompt) + size, layers, k]: the experts that were recorded of each token, -1 of others; or None."""
        length = len(self.prompt) + self.size
        found: np.ndarray | None = None
        for segment in self.segments:
            if segment.before is not None:
                before = pad_experts([segment.before[:length]], length)
                found = before if found is None or before is None else np.where(found == NOT_RECORDED, before, found)
        return in_order(len(self.prompt), None if found is None else found.reshape(length, *found.shape[2:]), self.own)

    @property
    def actions(self) -> np.ndarray:
        """bool[size]: which of the tokens after the prompt were sampled."""
        parts = [np.full(segment.tokens.size, segment.sampled) for segment in self.segments]
        return np.concatenate([np.zeros(0, bool), *parts])

    @property
    def turns(self) -> np.ndarray:
        """int32[size]: turn of each sampled token, from 0; -1 for given tokens, which separate turns."""
        turn, after_given, out = 0, False, [np.zeros(0, np.int32)]
        for segment in self.segments:
            if segment.sampled:
                turn, after_given = turn + after_given, False
                out.append(np.full(segment.tokens.size, turn, np.int32))
            else:
                # Tokens given before the first action do not start a new turn.
                after_given = after_given or any(s.sampled for s in self.segments[: len(out) - 1])
                out.append(np.full(segment.tokens.size, -1, np.int32))
        return np.concatenate(out)

    @property
    def last(self) -> tuple[int, ...]:
        """Token ids of the last sampled segment."""
        sampled = [segment for segment in self.segments if segment.sampled]
        return tuple(sampled[-1].tokens.token.tolist()) if sampled else ()

    def first(self, count: int) -> Episode:
        """The episode cut to `count` tokens after the prompt, e.g. to fork it. InputError unless 0 <= count <= size."""
        if not 0 <= count <= self.size:
            raise InputError(f"cannot take the first {count} of {self.size} tokens of an episode")
        kept, left = [], count
        for segment in self.segments:
            if left > 0:
                kept.append(segment._replace(tokens=segment.tokens.first(left)))
            left -= segment.tokens.size
        return replace(
            self, segments=tuple(kept), ended=False, truncated=False, reward=None, rewards={}, info=dict(self.info),
            entries={}, turn_rewards=(), state_keys=(),
        )  # fmt: skip

    def scored(
        self, reward: float, rewards: Mapping[str, float] | None = None, entries: Mapping[str, Any] | None = None
    ) -> Episode:
        """The episode with its reward, and what the reward functions returned beside it."""
        return replace(self, reward=float(reward), rewards=dict(rewards or {}), entries=dict(entries or {}))

    def in_part(self, number: int) -> Episode:
        """The episode in another group of its program, which info["part"] notes."""
        return replace(self.with_info(part=float(number)), part=number)

    def trained_under(self, prompt: Sequence[int]) -> Episode:
        """The episode, to be trained on under another prompt than the one that it was sampled under.

        Its row has that prompt, and keeps the log-probabilities of the distribution that drew the tokens as
        `behaviour_logp`; all else is computed under that prompt. info["off_prompt"] is 1 for it, and 0 for an episode
        under its own prompt. InputError for an empty prompt.
        """
        ids = tuple(map(int, prompt))
        if not ids:
            raise InputError("an episode is trained on under a prompt of at least one token, but found none")
        return replace(self, trained_prompt=None if ids == self.prompt else ids).with_info(
            off_prompt=float(ids != self.prompt)
        )

    def with_given(self, place: int, ids: Sequence[int]) -> Episode:
        """The episode, to be trained on with other tokens in its given segment `place` than it was sampled with.

        As with `trained_under`, its actions keep the log-probabilities of the distribution that drew them, and
        info["off_prompt"] is 1 if the tokens differ. What top-k, top-p and min-p kept after them, and which experts a
        router chose, is not known then. InputError for a segment that was sampled.
        """
        if self.segments[place].sampled:
            raise InputError(f"segment {place} of the episode was sampled: only given tokens can be replaced")
        if self.segments[place].tokens.token.tolist() == list(ids):
            return self.with_info(off_prompt=0.0)
        later = (one.elsewhere() for one in self.segments[place + 1 :])
        segments = (*self.segments[:place], given(ids), *later)
        return replace(self, segments=segments).with_info(off_prompt=1.0)

    def with_info(self, **entries: float | Sequence[float]) -> Episode:
        """The episode with these entries added to `info`."""
        return replace(self, info={**self.info, **entries})


def with_reply(row: Episode, asked: Episode) -> Episode:
    """The row with the last reply of another, as if it had been sampled there."""
    return replace(row + asked.segments[-1].elsewhere(), ended=asked.ended, truncated=asked.truncated)


def given(ids: Sequence[int], policy_step: int = 0) -> Segment:
    """A segment of tokens that were not sampled: an observation, a hint, or the beginning of a known solution."""
    token = np.asarray(list(ids), np.int32)
    zeros = np.zeros(token.shape, np.float32)
    floor = np.full(token.shape, -np.inf, np.float32)
    return Segment(Tokens(token, zeros, zeros, floor, zeros, np.full(token.shape, policy_step, np.int32)), False)


def sampled_ids(episode: Episode) -> list[int]:
    """The sampled token ids, which reward functions see."""
    return episode.own.token[episode.actions].tolist()


def known_scores(episodes: Sequence[Episode]) -> np.ndarray:
    """f64[m]: the scores of those episodes that have one."""
    scores = np.asarray([episode.score for episode in episodes], np.float64)
    return scores[~np.isnan(scores)]


def checksum(ids: Sequence[int] | np.ndarray) -> int:
    """A checksum of token ids, the same in every process."""
    return zlib.crc32(np.asarray(ids, np.int32).tobytes())
