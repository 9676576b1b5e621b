"""Selection of the rows and tokens to train on, deterministic or random."""

from jaxrl_llm.selection.noise import row_noise, token_noise
from jaxrl_llm.selection.rows import keep_weighted, max_variance_subset, resampled_counts
from jaxrl_llm.selection.tokens import late_tokens, top_tokens

__all__ = [
    "keep_weighted",
    "late_tokens",
    "max_variance_subset",
    "resampled_counts",
    "row_noise",
    "token_noise",
    "top_tokens",
]
