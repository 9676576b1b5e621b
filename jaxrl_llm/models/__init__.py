"""Policies: one decoder for several families, loading and saving, log-probability and entropy of sampled tokens.

Names are imported when they are first used: what is checked before a model is loaded needs no JAX.
"""

from typing import TYPE_CHECKING

from jaxrl_llm.utils.lazy import imported_at_first_use

if TYPE_CHECKING:
    from jaxrl_llm.models.config import ModelConfig
    from jaxrl_llm.models.families import from_hf, to_hf
    from jaxrl_llm.models.io.load import load_policy
    from jaxrl_llm.models.io.reward_model import load_reward_model
    from jaxrl_llm.models.io.save import save_policy
    from jaxrl_llm.models.policy import Policy, init_params, parameter_count, parameter_table

__all__ = [
    "ModelConfig", "Policy", "from_hf", "init_params", "load_policy", "load_reward_model", "parameter_count",
    "parameter_table", "save_policy", "to_hf",
]  # fmt: skip
_MODULES = {
    "config": "ModelConfig",
    "families": "from_hf to_hf",
    "io.load": "load_policy",
    "io.reward_model": "load_reward_model",
    "io.save": "save_policy",
    "policy": "Policy init_params parameter_count parameter_table",
}
__getattr__ = imported_at_first_use(__name__, _MODULES)
