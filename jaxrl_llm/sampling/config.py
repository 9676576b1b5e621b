"""`SamplingConfig`: how completions are sampled, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SamplingConfig:
    """How completions are sampled; see `sampling.sample`."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    slots: int = 0
    """Completions decoded at a time; 0 is all of a step's."""
    cache_dtype: Any = None
    """Of keys and values; None: the policy's."""

    @property
    def truncating(self) -> bool:
        """Whether tokens are drawn from a part of the vocabulary."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0
