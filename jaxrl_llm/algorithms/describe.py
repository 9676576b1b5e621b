"""Descriptions of the catalogue's methods: paper, needs, hyper-parameters with origins, composition, test."""

import inspect
import math
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any, NamedTuple

from jaxrl_llm.algorithms import FAMILIES, constructor, families, get, names
from jaxrl_llm.algorithms.composition import composition
from jaxrl_llm.algorithms.method import Facts, Parts, facts_of, presets_of
from jaxrl_llm.algorithms.parts import missing
from jaxrl_llm.core.arguments.hyperparameters import TYPE_NAMES, Hyperparameter, hyperparameters_of
from jaxrl_llm.core.arguments.ranges import Range
from jaxrl_llm.core.needs import need_of
from jaxrl_llm.utils.errors import InputError, shown

START = {  # methods to begin with -> why
    "grpo": "the default: samples of a prompt are compared with each other, no critic",
    "dapo": "GRPO that replaces groups which teach nothing, clips higher, and has no reference policy",
    "dr_grpo": "GRPO without its biases towards short answers and towards questions that are nearly solved",
    "gspo": "ratios of whole completions: steadier for mixtures of experts and long answers",
    "cispo": "clips the weight of a token instead of dropping it: for long reasoning",
    "rloo": "plain REINFORCE with the mean of the others as baseline: fewest settings",
    "ppo": "with a critic: for rewards in the middle of an answer, or one sample a prompt",
}
# Needs that every run computes, and are not told in the list, and those with a plainer name.
COMPUTED = frozenset({"feedback", "old_logp"})
PLAIN = {"reference_logp": "reference policy", "previous_logp": "previous policy", "values": "critic"}
WHERE_TO_START = "Where to start"
MARK = "*"  # marks methods that lack a part, or need what only some runs provide


class Card(NamedTuple):
    """A method: its title, facts and needs."""

    name: str
    title: str  # the docstring's first line
    facts: Facts
    needs: tuple[str, ...]


def method_card(name: str) -> Card:
    """The card of a method; InputError for an unknown name, ValueError for a function without `@method`."""
    build = constructor(name)
    facts = facts_of(build)
    if facts is None:
        raise ValueError(f"{name} has no facts: decorate it with @method of jaxrl_llm.algorithms.method")
    title = (inspect.getdoc(build) or "").split("\n\n")[0].replace("\n", " ")
    return Card(name, title, facts, tuple(sorted(get(name).needs)))


def parameters(name: str) -> list[Hyperparameter]:
    """The hyper-parameters of a method, in order, with ranges and origins; `preset` has no origin."""
    return hyperparameters_of(constructor(name))


def valid_values(method: str, parameter: Hyperparameter) -> str:
    """The valid values of a hyper-parameter in words: "0 to 1", "whole, at least 1", '"std" or "none"'."""
    return values_in(constructor(method), parameter)


def values_in(build: Callable[..., Any], parameter: Hyperparameter) -> str:
    """`valid_values` a parameter of the function that builds a method."""
    kind = parameter.type
    if parameter.name == "preset":
        return _either(presets_of(build))
    optional = " or None" if parameter.is_optional else ""
    if kind is bool:
        return TYPE_NAMES[kind] + optional
    if kind is str:
        words = "text" if parameter.default == "" and not parameter.choices else None
        return (words or _either(choices(build, parameter.name))) + optional
    least, most, above, _ = parameter.range
    if most is not None and most < 2**31 - 1:
        words = f"{least} to {most}"
    elif least is not None or above is not None:
        words = f"at least {least}" if above is None else f"above {above}"
    else:
        words = "any number"
    limited = parameter.range != Range()
    return (words if kind is not int else "whole, " + words if limited else "any whole number") + optional


def choices(build: Callable[..., Any], parameter: str) -> tuple[str, ...]:
    """The choices of a text hyper-parameter, read from the error that an invalid one raises; empty for free text."""
    try:
        build(**{parameter: "?"})
    except InputError as error:
        return tuple(getattr(error, "known", ()))
    return ()


def _either(texts: Any) -> str:
    quoted = [f'"{text}"' for text in texts]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted) or "a name"


def listing(find: str = "", more: str = "") -> str:
    """A table of the methods by family: name, year, title, and what a run needs that others do without.

    Methods that lack a part are marked. Those to begin with come first.

    find: list only methods whose name, docstring, parameters or needs contain all of its words, ignoring case.
    more: further lines, after the families. InputError if there is neither a method nor these.
    """
    words = find.lower().split()
    cards = {name: method_card(name) for name in names()}
    texts = {name: searchable_text(name, constructor(name), card.facts, card.needs) for name, card in cards.items()}
    cards = {name: card for name, card in cards.items() if all(word in texts[name] for word in words)}
    if not cards and not more:
        raise InputError(f"no method mentions {shown(find)}: run `jaxrl algorithms` to list all")
    width = max(map(len, cards), default=0)
    text = list[str]()
    if not words:
        begin = max(len(name) for name in START)
        text = [WHERE_TO_START, *(f"  {name:{begin}}  {why}" for name, why in START.items())]
    for stage, methods in by_stage().items():
        lines = [_line(cards[name], width) for name in methods if name in cards]
        text += [f"\n{stage}", *lines] if lines else []
    text += ["", more] if more else []
    if any(missing(name) for name in cards):
        text += ["", f"{MARK} needs what only some runs provide: jaxrl algorithms NAME says what."]
    return "\n".join(text).lstrip("\n")


def by_stage() -> dict[str, list[str]]:
    """The names of all methods by the title of their family, in order; methods that were added come last."""
    found: dict[str, list[str]] = {}
    for family in FAMILIES:
        title = (import_module(f"jaxrl_llm.algorithms.{family}").__doc__ or family).strip().removesuffix(".")
        found[title] = [name for name, where in families().items() if where == family]
    rest = [name for name in names() if name not in families()]
    return found | ({"Others": rest} if rest else {})


def _line(card: Card, width: int) -> str:
    mark = MARK if missing(card.name) else " "
    named = dict.fromkeys(PLAIN.get(x.partition(":")[0], x) for x in card.needs if x not in COMPUTED)
    needs = f"  [needs {', '.join(named)}]" if named else ""
    return f"  {card.name:{width}} {mark} {card.facts.year}  {card.title}{needs}"


def searchable_text(name: str, build: Callable[..., Any], facts: Facts, needs: Iterable[str] = ()) -> str:
    """What a search among methods looks for words in: all in lower case."""
    about = [name, inspect.getdoc(build) or "", facts.paper, str(facts.year)]
    return " ".join([*about, *inspect.signature(build).parameters, *needs]).lower()


def page(name: str) -> str:
    """The page of a method: equations, missing parts, hyper-parameters, needs, outputs, composition and test."""
    build = constructor(name)
    card = method_card(name)
    facts = card.facts
    needs = "\n".join(f"  {need}: {need_of(need).text}" for need in card.needs)
    title, _, text = (inspect.getdoc(build) or "").partition("\n\n")
    paragraphs = [f"{name}\n\n{title} {facts.paper}, {facts.year}.\n\n{text}"]
    if needed := missing(name):
        paragraphs.append(
            f"Incomplete in some runs; to train without: --algorithm.without {','.join(needed)}\n" + _listed(needed)
        )
    if facts.beside:
        paragraphs.append(beside_of(facts))
    paragraphs += [
        "Hyper-parameters (--algorithm.NAME VALUE; the run fills in its own where they are None):\n" + table_of(build),
        "Needs beyond a sampled and scored batch:\n" + (needs or "  nothing"),
        "Outputs:\n" + _outputs(name),
        "Composition:\n\n" + composition(build).rstrip(),
        f"Tested by: tests/algorithms/{facts.test}",
    ]
    return "\n\n".join(paragraphs)


def table_of(build: Callable[..., Any]) -> str:
    """The hyper-parameters of the function that builds a method, a line each: default, values, origin, presets."""
    sets, rows = presets_of(build), list[list[str]]()
    for one in hyperparameters_of(build):
        others = [f"{preset}: {_plain(sets[preset][one.name])}" for preset in sets if one.name in sets[preset]]
        said = [f"{one.name} = {_plain(one.default)}", values_in(build, one)]
        rows.append([*said, "; ".join(filter(None, [one.origin, *others]))])
    if not rows:
        return "  none"
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(f"  {row[0]:{widths[0]}}  {row[1]:{widths[1]}}  {row[2]}".rstrip() for row in rows)


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and math.isfinite(value) else repr(value)


def beside_of(facts: Facts) -> str:
    """The parts of the paper that are not here, a line each."""
    return "Also in the paper, but not implemented:\n" + _listed(facts.beside)


def _listed(parts: Parts) -> str:
    return "\n".join(f"  {part}: {what} (wanted: {by})" for part, (what, by) in parts.items())


def _outputs(name: str) -> str:
    """The method's outputs: advantages and loss, and the rollout rules that it sets."""
    method = get(name)
    lines = ["  batch.advantages f32[N, L], and the loss"]
    if method.resampling is not None:
        lines.append(
            f"  curriculum: other prompts for groups without signal, at most {method.resampling.rounds} batches"
        )
    for name in ("prompts", "strategy", "rollout", "replay"):
        if (found := getattr(method, name)) is not None:
            lines.append(f"  {'curriculum' if name == 'prompts' else name}: {found}")
    if method.phases is not None:
        lines.append("  an update for each turn of the episodes, the last first")
    if method.target is not None:
        lines.append(f"  a target critic, which follows the critic: {method.target}")
    if method.routing != "none":
        lines.append(f"  routing of mixtures of experts, which updates replay: that of the {method.routing}")
    return "\n".join(lines)
