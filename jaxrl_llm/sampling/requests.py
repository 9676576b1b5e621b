"""Requests to the engine, how they are sampled (`SamplingConfig`), and the completions that it returns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.utils.errors import InputError

Cut = Callable[[np.ndarray], int | None]  # own tokens int32[n] -> length at which the completion ends, or None


class Tokens(NamedTuple):
    """A completion's tokens and their log-probabilities, entropies and so on; arrays [n]."""

    token: np.ndarray  # int32
    logp: np.ndarray  # f32; this and the next three are as in `decode.Drawn`
    entropy: np.ndarray
    floor: np.ndarray
    untruncated_logp: np.ndarray
    policy_step: np.ndarray  # int32, training step of the weights that drew the token
    # int8 or int16 [n, layers, k], the experts of the token before each, from whose state it was drawn; -1: not known
    experts: np.ndarray | None = None
    thoughts: np.ndarray | None = None  # f32[n, 3, K], records of soft tokens, see `core.soft_thinking`; -1: none
    ranked: np.ndarray | None = None  # f32[n, 3, K], the K most probable tokens, see `draw.Drawn`; -1: not known

    @property
    def size(self) -> int:
        """Number of tokens."""
        return self.token.shape[0]

    def first(self, count: int) -> Tokens:
        """The first `count` tokens."""
        return Tokens(*(None if x is None else x[:count] for x in self))  # type: ignore[arg-type]

    def after(self, count: int) -> Tokens:
        """The tokens after the first `count`."""
        return Tokens(*(None if x is None else x[count:] for x in self)) if count else self  # type: ignore[arg-type]

    def followed_by(self, others: Tokens) -> Tokens:
        """These tokens followed by the others."""
        return concatenate_tokens([self, others])

    @property
    def most_probable(self) -> np.ndarray:
        """`ranked`. Raises InputError unless it is recorded at all places."""
        if self.ranked is None or np.any(self.ranked[:, 0] < 0):
            raise InputError("the sampler did not record the most probable tokens: declare Demands(ranked=...)")
        return self.ranked

    def instead(self, place: int, rank: int) -> Tokens:
        """One token: that of a rank, from 0, in `most_probable` at a place, as if it had been drawn there."""
        token, logp, untruncated = self.most_probable[place, :, rank : rank + 1]
        one = self.first(place + 1).after(place)
        return one._replace(token=token.astype(np.int32), logp=logp, untruncated_logp=untruncated)


def concatenate_tokens(parts: Sequence[Tokens]) -> Tokens:
    """These tokens one after another. Where only some have a record, those of the others are -1."""

    def column(name: str) -> Any:
        found = [getattr(part, name) for part in parts]
        known = next((x for x in found if x is not None), None)
        if known is None:
            return None
        missing = (np.full((part.size, *known.shape[1:]), -1, known.dtype) for part in parts)
        return np.concatenate([empty if x is None else x for x, empty in zip(found, missing, strict=True)])

    return Tokens(*map(column, Tokens._fields))


_NO_IDS, _NO_NUMBERS = np.zeros(0, np.int32), np.zeros(0, np.float32)
NO_TOKENS = Tokens(_NO_IDS, _NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS, _NO_IDS)


RECORDS = ("experts", "thoughts")  # of `Tokens`, which not all of them have, and batches as well


class Prefix(NamedTuple):
    """A prompt as the caches hold it: its keys and values are those of one adapter."""

    prompt: tuple[int, ...]
    adapter: int = 0


@dataclass(frozen=True)
class Request:
    """One completion to sample. Requests with the same prompt and adapter share its prefill and its cache."""

    prompt: tuple[int, ...]
    limit: int  # most tokens of the completion, including `begun`
    prompt_id: int = 0  # keys the noise together with `sample`
    sample: int = 0
    begun: Tokens = NO_TOKENS  # tokens of an unfinished completion to continue
    pause_at: int | None = None  # number of tokens at which to return the completion unfinished; None: never
    given: int = 0  # leading tokens of `begun` from earlier turns, which are not searched for stop strings
    adapter: int = 0  # which of the weights' adapters it is drawn with, see `models.by_row`
    # Ids at places of the completion, from its first, that are not drawn; -1: they are. Of a masked-diffusion model.
    fixed: tuple[int, ...] = ()

    @property
    def prefix(self) -> Prefix:
        """What the caches hold of its prompt."""
        return Prefix(self.prompt, self.adapter)

    @property
    def until(self) -> int:
        """Number of tokens at which the engine stops decoding this request."""
        return self.limit if self.pause_at is None else min(self.limit, self.pause_at)


@dataclass(frozen=True)
class Completion:
    """A request's completion, including the tokens that it began with."""

    index: int  # of the request
    tokens: Tokens
    ended: bool  # by a stop token or a stop string
    limit: int
    prompt_experts: np.ndarray | None = None  # int[tokens, layers, k] of the prompt, where they are recorded

    @property
    def truncated(self) -> bool:
        """Whether it reached its limit without ending."""
        return not self.ended and self.tokens.size >= self.limit

    @property
    def unfinished(self) -> bool:
        """Whether it neither ended nor reached its limit, so that another request can continue it."""
        return not self.ended and self.tokens.size < self.limit


def as_tokens(drawn: Any, row: int, count: int, policy_step: int) -> Tokens:
    """The last `count` tokens of one row of the result of `decode.finished_tokens`, a `Drawn`."""

    def last(x: Any) -> np.ndarray | None:
        return None if x is None else np.array(x[row, x.shape[1] - count :])

    of_row: dict[str, Any] = {name: last(x) for name, x in drawn._asdict().items()}
    return Tokens(policy_step=np.full(count, policy_step, np.int32), **of_row)


def first_not_finite(tokens: Tokens) -> int | None:
    """Index of the first token that was drawn from logits that are not finite, or None.

    For such logits the sampler returns the token -1 or a log-probability or entropy that is not finite. `floor` is -inf
    where no token was dropped, so it is not checked.
    """
    finite = map(np.isfinite, (tokens.logp, tokens.entropy, tokens.untruncated_logp))
    good = np.all([tokens.token >= 0, *finite], axis=0)
    return None if good.all() else int(np.argmin(good))
