"""Losses as sums of small choices: ratio, surrogate, average, penalties."""

from jaxrl_llm.log_ratios import k1, k2, k3
from jaxrl_llm.objectives.averages import constant, sequence_mean, sequence_sum, slice_token_mean, token_mean
from jaxrl_llm.objectives.penalties import entropy, kl
from jaxrl_llm.objectives.policy_gradient import policy_gradient
from jaxrl_llm.objectives.ratios import Ratio, sequence_ratio, span_ratio, token_ratio
from jaxrl_llm.objectives.surrogates import clip, clipped_value, log_probability, unclipped
from jaxrl_llm.trajectory import row_means, weighted

__all__ = [
    "Ratio",
    "clip",
    "clipped_value",
    "constant",
    "entropy",
    "k1",
    "k2",
    "k3",
    "kl",
    "log_probability",
    "policy_gradient",
    "row_means",
    "sequence_mean",
    "sequence_ratio",
    "sequence_sum",
    "slice_token_mean",
    "span_ratio",
    "token_mean",
    "token_ratio",
    "unclipped",
    "weighted",
]
