"""Reinforcement learning of language models as an algebra of pure JAX functions.

The two pytrees that travel are in `trajectory`, the glue in `transform`; read these first. What a script needs is
`load_policy`, `sample`, `algorithms.get` and `training.update`; see the README.

Names are imported when they are first used, so that commands and reward processes that need no JAX start at once.
"""

import importlib
from typing import TYPE_CHECKING, Any

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


def __getattr__(name: str) -> Any:
    """Import a public name, or a module of the package, at its first use."""
    if name in _MODULES:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    elif name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    else:
        try:
            value = importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
