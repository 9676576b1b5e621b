"""Valid ranges of hyper-parameters by name; a name has the same range in every method of the catalogue."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_llm.algorithms.algorithm import Algorithm
from jaxrl_llm.coefficients import check_number
from jaxrl_llm.errors import InputError, shown, unknown
from jaxrl_llm.expressions import Attribute, Call, is_code, is_default, recorded

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


def check(method: str, name: str, value: Any, kind: str = "float") -> None:
    """InputError, naming method and hyper-parameter, for a value of the wrong type, not finite, or out of range.

    kind: the annotation of the parameter, such as "float | None". Scalar arrays pass, including traced ones.
    """
    label, (kind, _, rest) = f"{method}: {name}", kind.partition(" | ")
    if (value is None and rest == "None") or kind not in TYPE_NAMES:
        return
    if kind in ("bool", "str"):
        if not isinstance(value, bool if kind == "bool" else str):
            raise InputError(f"{label} is {shown(value)}, but must be {TYPE_NAMES[kind]}")
        return
    if getattr(value, "shape", ()) != ():
        raise InputError(f"{label} is an array of the shape {list(value.shape)}, but must be {TYPE_NAMES[kind]}")
    check_number(label, value, whole=kind == "int", **RANGES.get(name, {}))


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
        return _as_code(build(**given), Call(method, (), _changed(given, parameters)))

    return method


def _changed(given: Mapping[str, Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """The hyper-parameters that differ from their defaults, or all of them beside a preset, which has defaults too."""
    if given.get("preset") is not None:
        return dict(given)
    return {name: value for name, value in given.items() if not is_default(value, parameters[name].default)}


def _as_code(algorithm: Algorithm, call: Call) -> Algorithm:
    """The algorithm, with parts that hold local functions printed as those of the method: `remax().transform`."""
    local = {
        field.name: recorded(value, Attribute(call, field.name))
        for field in dataclasses.fields(algorithm)
        if (value := getattr(algorithm, field.name)) is not None and not is_code(value)
    }
    return dataclasses.replace(algorithm, **local)
