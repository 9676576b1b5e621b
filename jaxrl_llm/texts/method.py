"""What a method of texts is, and the catalogue of those that there are."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxrl_llm.core.arguments.signatures import TEXT_METHODS
from jaxrl_llm.texts.candidates import State
from jaxrl_llm.texts.engine import Engine, Row
from jaxrl_llm.utils.errors import unknown

Step = Callable[[State, Sequence[Row], Engine], State]


@dataclass(frozen=True)
class TextMethod:
    """A method that optimises a text.

    init: the first text -> the state. step: (state, tasks, engine) -> the state after; everything random in it is
    drawn from the engine. text: state -> the text to use.
    """

    init: Callable[[str], State]
    step: Step
    text: Callable[[State], str]


Build = Callable[..., TextMethod]


def names() -> list[str]:
    """The names of the methods."""
    return sorted(TEXT_METHODS)


def constructor(name: str) -> Build:
    """The function that builds a method; InputError, with the nearest name, for an unknown one."""
    if name not in TEXT_METHODS:
        raise unknown("method of texts", name, TEXT_METHODS)
    build: Build = getattr(importlib.import_module(f"jaxrl_llm.texts.methods.{name}"), name)
    return build


def get(name: str, **hyperparameters: object) -> TextMethod:
    """Build a method by name. InputError for an unknown name or hyper-parameter, and for a value out of range."""
    return constructor(name)(**hyperparameters)
