"""`SamplingConfig`: how completions are sampled, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SamplingConfig:
    """How completions are sampled; see `sampling.sample` for the fields."""

    max_new_tokens: int = 128
    """Longest completion, tokens."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Nucleus sampling: above 0, at most 1 (off)."""
    top_k: int = 0
    """Sample among the k likeliest tokens; 0 is off."""
    min_p: float = 0.0
    """Sample among tokens of at least this fraction of the greatest probability; 0 is off."""
    stop: tuple[str, ...] = ()
    """Strings that end a completion."""
    slots: int = 0
    """Completions decoded at a time; 0: all of a step."""
    cache_dtype: Any = None
    """Dtype of keys and values; None: the policy's."""

    @property
    def truncating(self) -> bool:
        """Whether top-k, top-p or min-p truncates the distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0
