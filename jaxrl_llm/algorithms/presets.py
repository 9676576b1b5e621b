"""Named sets of defaults, for methods whose paper and released code differ in several choices."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.utils.errors import InputError, shown, unknown

Build = Callable[..., Algorithm]


def presets(**sets: Mapping[str, Any]) -> Callable[[Build], Build]:
    """Add the parameter `preset` to a method, the name of one of the sets, whose values replace the method's defaults.

    Explicit arguments override the preset; with None the defaults are those of the signature. Values must be literals,
    because the command line reads them from the source. Raises InputError if a set names an unknown parameter, and,
    when the method is called, for an unknown preset.

        @presets(paper={"average": "prompt"}, code={"average": "token", "dual_clip": 10.0})
        def dapo(clip_low: float = 0.2, ..., average: str = "token", dual_clip: float | None = None) -> Algorithm:
    """

    def decorate(build: Build) -> Build:
        signature = inspect.signature(build)
        for values in sets.values():
            for name in values:
                if name not in signature.parameters:
                    raise unknown(f"hyper-parameter of {build.__name__}", name, signature.parameters)

        @functools.wraps(build)
        def method(*args: Any, preset: str | None = None, **given: Any) -> Algorithm:
            if preset is None:
                return build(*args, **given)
            if preset not in sets:
                raise InputError(
                    f"{build.__name__}: preset is {shown(preset)}, but must be one of {', '.join(sets)}, or left out"
                )
            positional = dict(zip(signature.parameters, args, strict=False))
            return build(**{**sets[preset], **positional, **given})

        kind = Literal[tuple(sets)] | None  # type: ignore[valid-type]
        parameter = inspect.Parameter("preset", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        with_preset = signature.replace(parameters=[*signature.parameters.values(), parameter])
        method.__dict__.update(presets=sets, __signature__=with_preset)
        method.__annotations__ = {**build.__annotations__, "preset": kind}
        return method

    return decorate


def presets_of(build: Build) -> dict[str, Mapping[str, Any]]:
    """The presets of a method by name; empty if it has none."""
    return dict(getattr(build, "presets", {}))
