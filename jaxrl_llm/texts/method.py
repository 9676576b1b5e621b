"""What a method of texts is, and the catalogue of those that there are."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from jaxrl_llm.algorithms.describe import beside_of, searchable_text, table_of
from jaxrl_llm.algorithms.method import Facts, facts_of
from jaxrl_llm.core.arguments.signatures import TEXT_METHODS
from jaxrl_llm.texts import methods
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


def facts(name: str) -> Facts:
    """The facts of a method."""
    found = facts_of(constructor(name))
    assert found is not None
    return found


def lines(find: str = "") -> str:
    """The methods with their years and titles, after that of the family; "" where none has all of the words."""
    words = find.lower().split()
    found = [
        name for name in names() if all(word in searchable_text(name, constructor(name), facts(name)) for word in words)
    ]
    width = max(map(len, found), default=0)
    listed = [f"  {name:{width}}   {facts(name).year}  {_about(name)[0]}" for name in found]
    return "\n".join([(methods.__doc__ or "").strip().removesuffix("."), *listed]) if found else ""


def page(name: str) -> str:
    """The page of a method: what it does, its hyper-parameters, and the test of its own part."""
    title, text = _about(name)
    own = facts(name)
    paragraphs = [f"{name}\n\n{title} {own.paper}, {own.year}.\n\n{text}"]
    paragraphs += [beside_of(own)] if own.beside else []
    paragraphs.append("Hyper-parameters (--algorithm.NAME VALUE):\n" + table_of(constructor(name)))
    paragraphs.append(f"Run by: jaxrl texts {name}")
    return "\n\n".join([*paragraphs, f"Tested by: tests/texts/{own.test}"])


def _about(name: str) -> tuple[str, str]:
    title, _, text = (inspect.getdoc(constructor(name)) or "").partition("\n\n")
    return title, text
