"""Valid ranges of hyper-parameters by name; a name has the same range in every method of the catalogue."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm import choices
from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.coefficients import check_number
from jaxrl_llm.errors import InputError, shown, unknown

AT_LEAST_0 = (
    "advantage_strength", "alpha", "anisotropy", "batch_epsilon", "beta", "bonus", "clip_high", "clip_low",
    "clip_strength", "coefficient", "control_weight", "decay", "drop", "entropy_coefficient", "entropy_floor",
    "entropy_target", "entropy_weight", "epsilon", "eta", "extreme", "gain", "hold", "imitation_coefficient",
    "internal_steps", "intra_coefficient", "kappa", "kl_coefficient", "kl_limit", "length_bonus", "multiplier_rate",
    "next_scale", "novelty_coefficient", "penalty_scale", "power", "strength", "tail_weight", "target_entropy",
    "trust", "value_coefficient",
)  # fmt: skip
FRACTIONS = (
    "budget_share", "end", "least", "least_kept", "low_step", "most_kept", "partial", "quantile", "quantile_rate",
    "rate", "sigma", "start", "tokens_first", "tokens_last",
)  # fmt: skip
ABOVE_0 = ("hot", "cold", "high_step", "kl_horizon", "learning_rate", "power", "temperature")
COUNTS = ("every", "k", "max_length", "prompts", "rounds", "set_size", "total_steps")
RANGES: dict[str, dict[str, Any]] = {
    **{name: {"least": 0} for name in AT_LEAST_0},
    **{name: {"least": 0, "most": 1} for name in FRACTIONS},
    **{name: {"least": 1, "most": 2**31 - 1} for name in COUNTS},
    **{name: {"above": 0} for name in ABOVE_0},
    "ddof": {"least": 0, "most": 1},
}


TYPE_NAMES = {"bool": "true or false", "str": "text", "int": "a whole number", "float": "a number"}


def is_choice(kind: str) -> bool:
    """Whether an annotation lists names: a Literal, or one of `jaxrl_llm.choices`."""
    return kind.startswith("Literal[") or hasattr(choices, kind)


def check(
    method: str, name: str, value: Any, kind: str = "float", ranges: Mapping[str, Mapping[str, Any]] = RANGES
) -> None:
    """InputError, naming method and hyper-parameter, for a value of the wrong type, not finite, or out of range.

    kind: the annotation of the parameter, such as "float | None". ranges: limits by the hyper-parameter's name. Scalar
    arrays pass, including traced ones.
    """
    label, (kind, _, rest) = f"{method}: {name}", kind.partition(" | ")
    kind = "str" if is_choice(kind) else kind
    if (value is None and rest == "None") or kind not in TYPE_NAMES:
        return
    if kind in ("bool", "str"):
        if not isinstance(value, bool if kind == "bool" else str):
            raise InputError(f"{label} is {shown(value)}, but must be {TYPE_NAMES[kind]}")
        return
    if getattr(value, "shape", ()) != ():
        raise InputError(f"{label} is an array of the shape {list(value.shape)}, but must be {TYPE_NAMES[kind]}")
    check_number(label, value, whole=kind == "int", **ranges.get(name, {}))


def checked(build: Callable[..., Algorithm]) -> Callable[..., Algorithm]:
    """Wrap the function that builds a method with a check of its hyper-parameters' names, types and ranges."""
    parameters = inspect.signature(build).parameters

    @functools.wraps(build)
    def method(*args: Any, **hyperparameters: Any) -> Algorithm:
        if len(args) > len(parameters):
            raise InputError(f"{build.__name__} has {len(parameters)} hyper-parameters, but was given {len(args)}")
        given = {**dict(zip(parameters, args, strict=False)), **hyperparameters}
        for name, value in given.items():
            if name not in parameters:
                raise unknown(f"hyper-parameter of {build.__name__}", name, parameters)
            check(build.__name__, name, value, str(parameters[name].annotation))
        return build(**given)

    return method
