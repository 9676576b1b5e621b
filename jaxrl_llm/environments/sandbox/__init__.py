"""A sandbox for code that the policy writes, in layers; see `run`."""

from jaxrl_llm.environments.sandbox.layers import GUARDS, LAYERS, available, guards, require_guards
from jaxrl_llm.environments.sandbox.run import Limits, Result, run_code
from jaxrl_llm.environments.sandbox.session import Session

__all__ = ["GUARDS", "LAYERS", "Limits", "Result", "Session", "available", "guards", "require_guards", "run_code"]
