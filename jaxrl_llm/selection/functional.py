"""Selection as functions of arrays: ranks, subsets, counts; and the noise of a batch's rows and tokens.

Nothing here makes a transform; what does is in `jaxrl_llm.selection`. The code is in the modules by subject.
"""

from jaxrl_llm.selection.rows import (
    late_tokens,
    max_variance_subset,
    ranks_within,
    resampled_counts,
    row_noise,
    token_noise,
    top_tokens,
)

__all__ = [
    "late_tokens", "max_variance_subset", "ranks_within", "resampled_counts", "row_noise", "token_noise", "top_tokens",
]  # fmt: skip
