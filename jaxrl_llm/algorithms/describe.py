"""What the catalogue says of a method: year, title, needs, defaults, composition."""

from __future__ import annotations

import inspect
import re
from typing import NamedTuple

from jaxrl_llm.algorithms import constructor, get, names
from jaxrl_llm.algorithms.needs import NEEDS, value_of

PAPER = re.compile(r"arXiv \d{4}\.\d{4,5}|Machine Learning 8|technical report")
YEAR = re.compile(r"\b(?:19|20)\d\d\b(?!\.\d)")  # and not the first half of an arXiv number


class Card(NamedTuple):
    """The facts about a method, from its docstring and from what it returns."""

    name: str
    title: str  # the docstring's first line
    year: int
    paper: str  # "arXiv 2402.03300", or how else the source is named
    needs: tuple[str, ...]


def describe(name: str) -> Card:
    """The card of a method; InputError for an unknown name, ValueError where its docstring names no paper or year."""
    title = (inspect.getdoc(constructor(name)) or "").split("\n\n")[0].replace("\n", " ")
    paper, year = PAPER.search(title), YEAR.search(title)
    if not paper or not year:
        raise ValueError(f"the docstring of {name} must begin with its paper, as in (..., arXiv ID, YEAR).")
    return Card(name, title, int(year[0]), paper[0], tuple(sorted(get(name).needs)))


def listing() -> str:
    """A line for each method: name, year, what it is, and what it needs."""
    cards = [describe(name) for name in names()]
    width = max(len(card.name) for card in cards)
    return "\n".join(
        f"{card.name:{width}}  {card.year}  {card.title}" + (f"  [needs {', '.join(card.needs)}]" if card.needs else "")
        for card in cards
    )


def page(name: str) -> str:
    """Equations, defaults, needs and composition of a method."""
    build = constructor(name)
    source = inspect.getsource(build)
    defaults = [f"  {p.name} = {p.default!r}" for p in inspect.signature(build).parameters.values()]
    needs = [f"  {need}: {NEEDS[value_of(need)[0]]}" for need in describe(name).needs]
    parts = [
        f"{name}\n\n{inspect.getdoc(build)}",
        "Hyper-parameters (--algorithm.NAME VALUE; None is filled in by the run):\n"
        + "\n".join(defaults or ["  none"]),
        "Needs beyond a sampled and scored batch:\n" + "\n".join(needs or ["  nothing"]),
        "Composition:\n\n" + _code(source),
    ]
    return "\n\n".join(parts)


def _code(source: str) -> str:
    """A function's source without its docstring."""
    return re.sub(r'\n    (?:r)?""".*?"""', "", source, count=1, flags=re.DOTALL).rstrip()
