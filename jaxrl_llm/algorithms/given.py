"""Algorithms outside of the catalogue: values, functions of hyper-parameters that make one, and either in a file."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.arguments.hyperparameters import hyperparameters_of
from jaxrl_llm.core.arguments.signatures import NOT_GIVEN, PYTHON
from jaxrl_llm.core.shapes import in_words
from jaxrl_llm.core.transform import Objective, Transform
from jaxrl_llm.rewards.workers.loading import check_file, load_value
from jaxrl_llm.utils.errors import InputError, error_line, require_choice
from jaxrl_llm.utils.keywords import unknown_keyword

Build = Callable[..., Algorithm]
Given = str | Algorithm | Build


def from_file(spec: str) -> tuple[Build, str]:
    """`builder` of what path/to/file.py:NAME or package.module:NAME is, and the digest of its file.

    Raises InputError for a file or name that is missing or fails, and for the name of a Python program's value.
    """
    if spec.startswith(PYTHON):
        raise InputError(NOT_GIVEN.format(spec.removeprefix(PYTHON)))
    check_file(spec, "the algorithm")
    value, digest = load_value(spec, "an algorithm")
    return builder(value, spec), digest


def function_name(function: Any) -> str:
    """The name of a function, of a partial one too."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def builder(given: Algorithm | Build, name: str = "") -> Build:
    """The function of hyper-parameters that builds what is given, after a check of their names and types.

    given: an Algorithm, which has no hyper-parameters, or a function that returns one. name: of it, in errors. Types
    are checked where the function's parameters are annotated. Raises InputError for anything else; what is returned
    raises it for wrong hyper-parameters, if the function fails, and if it returns anything else.
    """
    if isinstance(given, Algorithm):
        return _value(given, name or "the algorithm")
    if not callable(given) or isinstance(given, Transform | Objective):
        found = f"{name} is {in_words(given)}, but must be" if name else f"the algorithm is {in_words(given)}, not"
        wrap = ": make one of the parts, Algorithm(transform=..., objective=...)"
        raise InputError(
            f"{found} an Algorithm, or a function of hyper-parameters that returns one"
            + (wrap if isinstance(given, Transform | Objective) else "")
        )
    label = name or function_name(given)
    try:
        signature = inspect.signature(given)
    except (TypeError, ValueError):
        raise InputError(f"{label} has no signature that says its hyper-parameters: wrap it in a function") from None
    parameters = {one.name: one for one in hyperparameters_of(given)}
    open_ended = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())

    def build(*args: Any, **hyperparameters: Any) -> Algorithm:
        for key, value in {**dict(zip(parameters, args, strict=False)), **hyperparameters}.items():
            if key in parameters:
                parameters[key].check(f"{label}: {key}", value)
                if value is not None and parameters[key].choices:
                    require_choice(f"{key} of {label}", value, parameters[key].choices)
            elif not open_ended:
                raise unknown_keyword(key, parameters, f"hyper-parameter of {label}")
        try:
            signature.bind(*args, **hyperparameters)
        except TypeError as error:
            raise InputError(f"{label} cannot be built: {error} (a hyper-parameter)") from None
        try:
            made = given(*args, **hyperparameters)
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"{label} cannot be built: {error_line(error)}") from error
        if not isinstance(made, Algorithm):
            raise InputError(f"{label} returns {in_words(made)}, but must return an Algorithm")
        return made

    functools.update_wrapper(build, given)
    build.__name__ = label
    build.__signature__ = signature  # type: ignore[attr-defined]
    return build


def _value(algorithm: Algorithm, label: str) -> Build:
    def build(**hyperparameters: Any) -> Algorithm:
        if hyperparameters:
            raise InputError(
                f"{label} is a value, which has no hyper-parameters: leave out {', '.join(hyperparameters)}, or give a "
                "function of them that returns an Algorithm"
            )
        return algorithm

    build.__name__ = label
    build.__signature__ = inspect.Signature()  # type: ignore[attr-defined]
    return build
