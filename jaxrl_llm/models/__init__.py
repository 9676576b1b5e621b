"""Policies: one decoder for several families, its weights in and out, and what it says of sampled tokens."""

from jaxrl_llm.models.config import ModelConfig, from_hf, to_hf
from jaxrl_llm.models.load import load_policy, save_policy
from jaxrl_llm.models.policy import Policy, init_params, parameter_count

__all__ = ["ModelConfig", "Policy", "from_hf", "init_params", "load_policy", "parameter_count", "save_policy", "to_hf"]
