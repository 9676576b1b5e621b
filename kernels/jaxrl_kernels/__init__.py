"""Kernels for reinforcement learning of language models. They need jax and nothing else.

Each operation is a folder: a plain reference that anyone can check, fast implementations tested against it, and one
public function that picks among them.
"""

from jaxrl_kernels.decode_attention import decode_attention
from jaxrl_kernels.logprob import fused_logprob, sharded_logprob
from jaxrl_kernels.ratio_clip import ratio_clip
from jaxrl_kernels.sample import fused_sample, sample_logits, sharded_sample

__all__ = [
    "decode_attention",
    "fused_logprob",
    "fused_sample",
    "ratio_clip",
    "sample_logits",
    "sharded_logprob",
    "sharded_sample",
]
