"""`SamplingConfig`: how completions are sampled, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SamplingConfig:
    """How completions are sampled; see `sampling.sample` for the fields."""

    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    slots: int = 0
    """Completions decoded at a time; 0: all of a step."""
    cache_dtype: Any = None
    """Dtype of keys and values; None: the policy's."""

    @property
    def truncating(self) -> bool:
        """Whether top-k, top-p or min-p truncates the distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0
