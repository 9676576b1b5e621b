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
    "ModelConfig",
    "Policy",
    "from_hf",
    "init_params",
    "load_policy",
    "load_reward_model",
    "parameter_count",
    "parameter_table",
    "save_policy",
    "to_hf",
]
_MODULES = {
    "ModelConfig": "config",
    "Policy": "policy",
    "from_hf": "families",
    "init_params": "policy",
    "load_policy": "io.load",
    "load_reward_model": "io.reward_model",
    "parameter_count": "policy",
    "parameter_table": "policy",
    "save_policy": "io.save",
    "to_hf": "families",
}


__getattr__ = imported_at_first_use(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
