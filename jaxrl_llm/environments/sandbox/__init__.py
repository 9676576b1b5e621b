"""A sandbox for code that the policy writes, in layers; see `run`."""

from jaxrl_llm.environments.sandbox.run import (
    GUARDS,
    LAYERS,
    Limits,
    Result,
    Session,
    available,
    guards,
    require_guards,
    run_code,
)

__all__ = [
    "GUARDS",
    "LAYERS",
    "Limits",
    "Result",
    "Session",
    "available",
    "guards",
    "require_guards",
    "run_code",
]
