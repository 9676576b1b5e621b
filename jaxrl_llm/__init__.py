"""Reinforcement learning of language models as an algebra of pure JAX functions.

Read `trajectory` (the two pytrees that functions exchange) and `transform` (how functions compose) first. A script
mostly needs `load_policy`, `sample`, `algorithms.get` and `learner.update`; see the README.

Names are imported on first use, so that commands and reward processes that do not need JAX start quickly.
"""

from typing import TYPE_CHECKING

from jaxrl_llm.lazy import imported_at_first_use

if TYPE_CHECKING:
    from jaxrl_llm import algorithms
    from jaxrl_llm.errors import InputError
    from jaxrl_llm.models import load_policy, save_policy
    from jaxrl_llm.reporting.completions import show
    from jaxrl_llm.reporting.credit import compare
    from jaxrl_llm.sampling import sample
    from jaxrl_llm.trajectory import PolicyOutputs, Trajectories
    from jaxrl_llm.transform import Objective, Transform, chain

__version__ = "0.1.0"
__all__ = [
    "InputError",
    "Objective",
    "PolicyOutputs",
    "Trajectories",
    "Transform",
    "algorithms",
    "chain",
    "compare",
    "load_policy",
    "sample",
    "save_policy",
    "show",
]
_MODULES = {
    "InputError": "errors",
    "Objective": "transform",
    "PolicyOutputs": "trajectory",
    "Trajectories": "trajectory",
    "Transform": "transform",
    "chain": "transform",
    "compare": "reporting.credit",
    "load_policy": "models",
    "sample": "sampling",
    "save_policy": "models",
    "show": "reporting.completions",
}


__getattr__ = imported_at_first_use(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
