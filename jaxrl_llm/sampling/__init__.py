"""Rollouts: prompts in, Trajectories with their behaviour log-probabilities out."""

from jaxrl_llm.sampling.sampler import completion_ids, completion_texts, sample

__all__ = ["completion_ids", "completion_texts", "sample"]
