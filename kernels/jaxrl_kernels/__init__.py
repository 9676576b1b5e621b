"""Kernels for reinforcement learning of language models. They depend only on jax.

Each operation is a folder with a plain reference, fast implementations tested against it, and one public function that
chooses between them (see `implementations`). That function works on any mesh of devices, also under `jax.jit` (see
`partition`).
"""

from jaxrl_kernels.decode_attention import decode_attention, own_attention
from jaxrl_kernels.delta_rule import delta_rule
from jaxrl_kernels.implementations import IMPLEMENTATIONS
from jaxrl_kernels.logprob import fused_logprob
from jaxrl_kernels.norm_rotate import norm_rotate
from jaxrl_kernels.packed_attention import packed_attention
from jaxrl_kernels.ratio_clip import ratio_clip
from jaxrl_kernels.sample import fused_sample, sample_logits

__all__ = [
    "IMPLEMENTATIONS", "decode_attention", "delta_rule", "fused_logprob", "fused_sample", "norm_rotate",
    "own_attention", "packed_attention", "ratio_clip", "sample_logits",
]  # fmt: skip
