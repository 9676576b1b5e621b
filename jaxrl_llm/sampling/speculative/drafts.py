"""Earlier completions of prompts, from which later completions of the same prompts are drafted."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

TEXTS = 64  # completions kept of a prompt
TOKENS = 2**23  # kept of all prompts


class Drafts:
    """The latest completions of prompts, by prompt id. They change the speed of sampling, never a token.

    `texts` are kept of each prompt, and of all together the latest `tokens`: the prompts that were added to last stay.
    """

    def __init__(
        self, of: Mapping[int, Iterable[Sequence[int] | np.ndarray]] | None = None, texts: int = TEXTS,
        tokens: int = TOKENS,
    ) -> None:  # fmt: skip
        """of: completions of prompts, the latest last."""
        self.texts, self.tokens, self.size = texts, tokens, 0
        self.of: dict[int, tuple[np.ndarray, ...]] = {}
        for prompt_id, completions in (of or {}).items():
            for completion in completions:
                self.add(prompt_id, completion)

    def add(self, prompt_id: int, completion: Sequence[int] | np.ndarray) -> None:
        """Keep a completion of a prompt, which becomes its latest and the prompt the latest of all."""
        before = self.of.pop(prompt_id, ())
        kept = (*before, np.asarray(completion, np.int32))[-self.texts :]
        self.size += _size(kept) - _size(before)
        self.of[prompt_id] = kept
        while self.size > self.tokens and len(self.of) > 1:
            self.size -= _size(self.of.pop(next(iter(self.of))))

    def with_added(self, completions: Iterable[tuple[int, Sequence[int] | np.ndarray]]) -> Drafts:
        """A copy with more completions: pairs of a prompt id and token ids."""
        new = Drafts(None, self.texts, self.tokens)
        new.of, new.size = dict(self.of), self.size
        for prompt_id, completion in completions:
            new.add(prompt_id, completion)
        return new

    def source(self, prompt_id: int, length: int, others: Iterable[np.ndarray] = ()) -> np.ndarray:
        """int32[length]: the latest completions that fit, the latest last, each followed by -1, and others after them.

        Unused places, which come first, are -1.
        """
        out, end = np.full(length, -1, np.int32), length
        for text in reversed([*self.of.get(prompt_id, ()), *others]):
            if text.size + 1 > end:
                break
            out[end - 1 - text.size : end - 1] = text
            end -= text.size + 1
        return out

    def to_arrays(self) -> dict[str, np.ndarray]:
        """Flat arrays for a checkpoint."""
        texts = [(prompt_id, text) for prompt_id, kept in self.of.items() for text in kept]
        return {
            "prompt": np.asarray([prompt_id for prompt_id, _ in texts], np.int64),
            "length": np.asarray([text.size for _, text in texts], np.int64),
            "token": np.concatenate([np.zeros(0, np.int32), *(text for _, text in texts)]),
        }

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, np.ndarray]) -> Drafts:
        """The inverse of `to_arrays`; empty for no arrays."""
        drafts = cls()
        if arrays:
            parts: Any = np.split(arrays["token"], np.cumsum(arrays["length"])[:-1])
            for prompt_id, text in zip(arrays["prompt"].tolist(), parts, strict=False):
                drafts.add(prompt_id, text)
        return drafts


def _size(texts: Iterable[np.ndarray]) -> int:
    return sum(text.size for text in texts)
