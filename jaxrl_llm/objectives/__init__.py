"""Losses as sums of small choices: ratio, surrogate, average, penalties."""

from jaxrl_llm.objectives.averages import sequence_mean, token_mean
from jaxrl_llm.objectives.penalties import entropy, k1, k2, k3, kl
from jaxrl_llm.objectives.policy_gradient import policy_gradient
from jaxrl_llm.objectives.ratios import token_ratio
from jaxrl_llm.objectives.surrogates import clip, clipped_value

__all__ = [
    "clip",
    "clipped_value",
    "entropy",
    "k1",
    "k2",
    "k3",
    "kl",
    "policy_gradient",
    "sequence_mean",
    "token_mean",
    "token_ratio",
]
