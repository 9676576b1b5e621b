"""Kernels for reinforcement learning of language models. They need jax and nothing else.

Each operation is a folder: a plain reference that anyone can check, fast implementations tested against it, and one
public function that picks among them.
"""

from jaxrl_kernels.logprob import fused_logprob
from jaxrl_kernels.sample import fused_sample, sample_logits, sharded_sample

__all__ = ["fused_logprob", "fused_sample", "sample_logits", "sharded_sample"]
