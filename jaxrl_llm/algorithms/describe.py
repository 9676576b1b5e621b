"""What the catalogue says of a method: paper, needs, parameters with their origin, composition, proof."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl_llm.algorithms import CATALOGUE, FAMILIES, constructor, get, names
from jaxrl_llm.algorithms.composition import composition
from jaxrl_llm.algorithms.presets import presets_of
from jaxrl_llm.algorithms.proofs import proof
from jaxrl_llm.algorithms.ranges import RANGES, WORDS
from jaxrl_llm.algorithms.unfinished import BESIDES, missing
from jaxrl_llm.errors import InputError, shown
from jaxrl_llm.needs import need_of

PAPER = re.compile(r"arXiv \d{4}\.\d{4,5}|Machine Learning 8|technical report")
YEAR = re.compile(r"\b(?:19|20)\d\d\b(?!\.\d)")  # and not the first half of an arXiv number
ORIGINS = {  # as the docstrings' last paragraph says them
    "Paper": "paper",
    "Code": "code",  # the released code, or a common implementation
    "Ours": "ours",
    "Run": "the run's",  # None, which the run fills in
}
STAGES = {  # of the data's way, in order: where the methods of a family differ from others
    "Rollouts: completions made with help": ("guided",),
    "Rewards: shaped or combined": ("shaped_reward", "multi_reward", "exploration"),
    "Selection: which completions are learnt from": ("selection",),
    "Credit: a baseline of the group, the batch or the past": (
        "group_relative",
        "critic_free",
        "score_function",
        "sets",
    ),
    "Credit: a learnt critic": ("actor_critic",),
    "Credit: by token": ("token_credit", "entropy_credit"),
    "Loss: ratio, clip and average": ("sequence_level", "weighted", "trust_region", "mismatch"),
    "Loss: regularisers": ("regularised",),
    "Loss: regression and preferences": ("regression", "preference"),
}
MARK = "*"  # of a method that lacks a part, or needs what only some runs provide


class Card(NamedTuple):
    """The facts about a method, from its docstring and from what it returns."""

    name: str
    title: str  # the docstring's first line
    year: int
    paper: str  # "arXiv 2402.03300", or how else the source is named
    needs: tuple[str, ...]


class Parameter(NamedTuple):
    """One hyper-parameter of a method."""

    name: str
    default: Any
    values: str  # its range, or its choices
    origin: str | None  # one of ORIGINS' values; None where the docstring does not say


def describe(name: str) -> Card:
    """The card of a method; InputError for an unknown name, ValueError where its docstring names no paper or year."""
    title = (inspect.getdoc(constructor(name)) or "").split("\n\n")[0].replace("\n", " ")
    paper, year = PAPER.search(title), YEAR.search(title)
    if not paper or not year:
        raise ValueError(f"the docstring of {name} must begin with its paper, as in (..., arXiv ID, YEAR).")
    return Card(name, title, int(year[0]), paper[0], tuple(sorted(get(name).needs)))


def origins(docstring: str) -> dict[str, str]:
    """Where each default comes from, of a docstring that ends with "Defaults. Paper: a, b. Code: c. Ours: d. Run: e."

    Empty without such a paragraph. Raises ValueError for another word, or a parameter that is named twice.

    >>> origins("Title. Defaults. Nothing.\\n\\nDefaults. Paper: clip_low, kl. Ours: ddof.")
    {'clip_low': 'paper', 'kl': 'paper', 'ddof': 'ours'}
    """
    last = " ".join(inspect.cleandoc(docstring).split("\n\n")[-1].split())
    if not last.startswith("Defaults."):
        return {}
    found = dict[str, str]()
    for part in filter(None, (part.strip() for part in last.removeprefix("Defaults.").split("."))):
        word, _, listed = part.partition(":")
        if word not in ORIGINS:
            raise ValueError(f"{word!r} is no origin of a default: {', '.join(ORIGINS)}")
        for name in listed.split(","):
            if name.strip() in found:
                raise ValueError(f"the default of {name.strip()} has two origins")
            found[name.strip()] = ORIGINS[word]
    return found


def parameters(name: str) -> list[Parameter]:
    """The hyper-parameters of a method, in order; of `preset` the origin is None."""
    build = constructor(name)
    told = origins(inspect.getdoc(build) or "")
    return [
        Parameter(one.name, one.default, values_of(name, one), told.get(one.name))
        for one in inspect.signature(build).parameters.values()
    ]


def values_of(method: str, parameter: inspect.Parameter) -> str:
    """In words what a hyper-parameter may be: "0 to 1", "whole, at least 1", '"std" or "none"'."""
    build = constructor(method)
    if parameter.name == "preset":
        return _either(presets_of(build))
    kind, _, rest = str(parameter.annotation).partition(" | ")
    optional = " or None" if rest == "None" else ""
    if kind == "bool":
        return WORDS[kind] + optional
    if kind == "str":
        return _either(choices(build, parameter.name)) + optional
    limits = RANGES.get(parameter.name, {})
    least, most, above = limits.get("least"), limits.get("most"), limits.get("above")
    if most is not None and most < 2**31 - 1:
        words = f"{least} to {most}"
    elif least is not None or above is not None:
        words = f"at least {least}" if above is None else f"above {above}"
    else:
        words = "any number"
    return (words if kind != "int" else "whole, " + words if limits else "any whole number") + optional


def choices(build: Callable[..., Any], parameter: str) -> tuple[str, ...]:
    """The texts that a hyper-parameter may be, as the method tells on being given another; empty for any text."""
    try:
        build(**{parameter: "?"})
    except InputError as error:
        return tuple(getattr(error, "known", ()))
    return ()


def _either(texts: Any) -> str:
    quoted = [f'"{text}"' for text in texts]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted) or "a name"


def listing(find: str = "") -> str:
    """A table of the methods by stage: name, year, title, needs. Methods that lack a part have a mark.

    find: only methods whose name, docstring, parameters or needs have all of its words, capital letters or not.
    InputError where there is none.
    """
    words = find.lower().split()
    cards = {name: describe(name) for name in names() if all(word in _searched(name) for word in words)}
    if not cards:
        raise InputError(f"no method mentions {shown(find)}: jaxrl algorithms lists all")
    width = max(len(name) for name in cards)
    text = list[str]()
    for stage, methods in by_stage().items():
        lines = [_line(cards[name], width) for name in methods if name in cards]
        text += [f"\n{stage}", *lines] if lines else []
    if any(missing(name) for name in cards):
        text += ["", f"{MARK} lacks a part, or needs what only some runs provide: jaxrl algorithms NAME says what."]
    return "\n".join(text).lstrip("\n")


def by_stage() -> dict[str, list[str]]:
    """The names of all methods by stage, in order; those of a family without a stage come last."""
    family = {name: module.__name__.rpartition(".")[2] for module in FAMILIES for name in module.__all__}
    found = {stage: [n for n in names() if family.get(n) in of_stage] for stage, of_stage in STAGES.items()}
    rest = [name for name in CATALOGUE if not any(name in methods for methods in found.values())]
    return found | ({"Others": sorted(rest)} if rest else {})


def _line(card: Card, width: int) -> str:
    mark = MARK if missing(card.name) else " "
    needs = f"  [needs {', '.join(card.needs)}]" if card.needs else ""
    return f"  {card.name:{width}} {mark} {card.year}  {card.title}{needs}"


def _searched(name: str) -> str:
    build = constructor(name)
    return " ".join([name, inspect.getdoc(build) or "", *inspect.signature(build).parameters, *get(name).needs]).lower()


def page(name: str) -> str:
    """Equations, parts that it lacks, parameters, needs, what it asks of the run, composition and test of a method."""
    build = constructor(name)
    text = inspect.getdoc(build) or ""
    if origins(text):
        text = text.rpartition("\n\n")[0]
    parts = [f"{name}\n\n{text}"]
    if lacks := missing(name):
        parts.append(f"Not whole in every run; to go without: --algorithm.without {','.join(lacks)}\n" + _lacks(lacks))
    if beside := BESIDES.get(name):
        parts.append("In the paper beside the method, and not here:\n" + _lacks(beside))
    parts += [
        "Hyper-parameters (--algorithm.NAME VALUE; the run fills in what is None and its own):\n" + _table(name),
        "Needs beyond a sampled and scored batch:\n" + _needs(name),
        "Gives the run:\n" + _gives(name),
        "Composition:\n\n" + composition(build).rstrip(),
    ]
    if proof(name):
        parts.append(f"Proved by: {proof(name)}")
    return "\n\n".join(parts)


def _table(name: str) -> str:
    """A line for each hyper-parameter: default, values, origin, and what presets change it to."""
    sets, rows = presets_of(constructor(name)), list[list[str]]()
    for one in parameters(name):
        others = [f"{preset}: {_plain(sets[preset][one.name])}" for preset in sets if one.name in sets[preset]]
        rows.append([f"{one.name} = {_plain(one.default)}", one.values, "; ".join(filter(None, [one.origin, *others]))])
    if not rows:
        return "  none"
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"  {row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}".rstrip() for row in rows)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else repr(value)


def _lacks(parts: dict[str, tuple[str, str]]) -> str:
    return "\n".join(f"  {part}: {what} (wanted: {by})" for part, (what, by) in parts.items())


def _needs(name: str) -> str:
    return "\n".join(f"  {need}: {need_of(need).text}" for need in describe(name).needs) or "  nothing"


def _gives(name: str) -> str:
    """What the method asks the loop to do, beside advantages and a loss."""
    method = get(name)
    lines = ["  batch.advantages f32[N, L], and the loss"]
    if method.curriculum is not None:
        lines.append(
            f"  curriculum: other prompts for groups without signal, at most {method.curriculum.rounds} batches"
        )
    if method.strategy is not None:
        lines.append(f"  strategy: {method.strategy}")
    return "\n".join(lines)
