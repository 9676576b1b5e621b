"""Descriptions of the catalogue's methods: paper, needs, hyper-parameters with origins, composition, test."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxrl_llm.algorithms import CATALOGUE, FAMILIES, constructor, get, names
from jaxrl_llm.algorithms.composition import composition
from jaxrl_llm.algorithms.omissions import BESIDES
from jaxrl_llm.algorithms.presets import presets_of
from jaxrl_llm.algorithms.proofs import proof
from jaxrl_llm.algorithms.ranges import RANGES, TYPE_NAMES, annotation, is_choice
from jaxrl_llm.algorithms.unfinished import missing
from jaxrl_llm.core.needs import need_of
from jaxrl_llm.utils.errors import InputError, shown

PAPER = re.compile(r"arXiv \d{4}\.\d{4,5}|Machine Learning 8|technical report")
YEAR = re.compile(r"\b(?:19|20)\d\d\b(?!\.\d)")  # not the first half of an arXiv number
ORIGINS = {  # words in the last paragraph of a docstring -> origins
    "Paper": "paper",
    "Code": "code",  # the released code, or a common implementation
    "Recalled": "from memory",  # of the paper, by who noted it down: not read there again
    "Ours": "ours",
    "Run": "the run's",  # default None, filled in by the run
}
STAGES = {  # stages of the data flow, in order -> families whose methods differ there
    "Curricula: which prompts, and how many samples of each": ("curricula",),
    "Rollouts: completions made with help": (
        "guided",
        "hinted",
        "hint_tokens",
        "prefixed",
        "self_distilled",
        "two_policies",
    ),
    "Rollouts: trees, and values of states": ("trees",),
    "Rewards: shaped or combined": ("shaped_reward", "multi_reward", "exploration", "reward_composed", "of_screens"),
    "Replay: completions of earlier steps": ("replayed", "swapped"),
    "Selection: which completions to train on": ("selection",),
    "Credit: a baseline of the group, the batch or earlier samples": (
        "group_relative",
        "critic_free",
        "score_function",
        "sets",
    ),
    "Credit: a learnt critic": ("actor_critic", "long_reasoning", "masked"),
    "Credit: by token": ("token_credit", "entropy_credit", "tempered"),
    "Credit: by turn, and by episode of several turns": (
        "turn_credit",
        "turn_values",
        "turn_shaped",
        "turn_planned",
        "turn_rows",
        "turn_chunks",
        "turn_information",
        "turn_models",
        "agent_trees",
        "agent_retries",
    ),
    "Loss: ratio, clip and average": ("sequence_level", "weighted", "trust_region", "covariance", "mismatch"),
    "Loss: regularisers": ("regularised", "moving_reference"),
    "Loss: regression and preferences": ("regression", "preference"),
    "Loss: likelihood of texts and of chosen samples": ("supervised",),
}
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
    """The facts about a method, from its docstring and its `Algorithm`."""

    name: str
    title: str  # the docstring's first line
    year: int
    paper: str  # "arXiv 2402.03300", or another name of the source
    needs: tuple[str, ...]


class Parameter(NamedTuple):
    """One hyper-parameter of a method."""

    name: str
    default: Any
    values: str  # its range, or its choices
    origin: str | None  # one of ORIGINS' values; None where the docstring does not say


def method_card(name: str) -> Card:
    """The card of a method; InputError for an unknown name, ValueError if its docstring names no paper or year."""
    title = (inspect.getdoc(constructor(name)) or "").split("\n\n")[0].replace("\n", " ")
    paper, year = PAPER.search(title), YEAR.search(title)
    if not paper or not year:
        raise ValueError(f"the docstring of {name} must begin with its paper: TITLE (..., arXiv ID, YEAR).")
    return Card(name, title, int(year[0]), paper[0], tuple(sorted(get(name).needs)))


def origins(docstring: str) -> dict[str, str]:
    """The origin of each default, from a docstring that ends with "Defaults. Paper: a, b. Code: c. Ours: d. Run: e."

    Empty without such a paragraph. Raises ValueError for any other word, and for a parameter that is listed twice.

    >>> origins("Title. Defaults. Nothing.\\n\\nDefaults. Paper: clip_low. Recalled: kl. Ours: ddof.")
    {'clip_low': 'paper', 'kl': 'from memory', 'ddof': 'ours'}
    """
    last = " ".join(inspect.cleandoc(docstring).split("\n\n")[-1].split())
    if not last.startswith("Defaults."):
        return {}
    found = dict[str, str]()
    for part in filter(None, (part.strip() for part in last.removeprefix("Defaults.").split("."))):
        word, _, listed = part.partition(":")
        if word not in ORIGINS:
            raise ValueError(f"{word!r} is not an origin of a default: use one of {', '.join(ORIGINS)}")
        for name in listed.split(","):
            if name.strip() in found:
                raise ValueError(f"the default of {name.strip()} has two origins")
            found[name.strip()] = ORIGINS[word]
    return found


def parameters(name: str) -> list[Parameter]:
    """The hyper-parameters of a method, in order; `preset` has no origin."""
    build = constructor(name)
    origin = origins(inspect.getdoc(build) or "")
    return [
        Parameter(one.name, one.default, values_of(name, one), origin.get(one.name))
        for one in inspect.signature(build).parameters.values()
    ]


def values_of(method: str, parameter: inspect.Parameter) -> str:
    """The valid values of a hyper-parameter in words: "0 to 1", "whole, at least 1", '"std" or "none"'."""
    build = constructor(method)
    if parameter.name == "preset":
        return _either(presets_of(build))
    kind, _, rest = annotation(parameter).partition(" | ")
    optional = " or None" if rest == "None" else ""
    if kind == "bool":
        return TYPE_NAMES[kind] + optional
    if kind == "str" or is_choice(kind):
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
    """The choices of a text hyper-parameter, read from the error that an invalid one raises; empty for free text."""
    try:
        build(**{parameter: "?"})
    except InputError as error:
        return tuple(getattr(error, "known", ()))
    return ()


def _either(texts: Any) -> str:
    quoted = [f'"{text}"' for text in texts]
    return " or ".join([", ".join(quoted[:-1]), quoted[-1]] if len(quoted) > 1 else quoted) or "a name"


def listing(find: str = "") -> str:
    """A table of the methods by stage: name, year, title, and what a run needs that others do without.

    Methods that lack a part are marked. Those to begin with come first.

    find: list only methods whose name, docstring, parameters or needs contain all of its words, ignoring case.
    InputError if there is none.
    """
    words = find.lower().split()
    cards = {name: method_card(name) for name in names() if all(word in _searched(name) for word in words)}
    if not cards:
        raise InputError(f"no method mentions {shown(find)}: run `jaxrl algorithms` to list all")
    width = max(len(name) for name in cards)
    text = list[str]()
    if not words:
        begin = max(len(name) for name in START)
        text = [WHERE_TO_START, *(f"  {name:{begin}}  {why}" for name, why in START.items())]
    for stage, methods in by_stage().items():
        lines = [_line(cards[name], width) for name in methods if name in cards]
        text += [f"\n{stage}", *lines] if lines else []
    if any(missing(name) for name in cards):
        text += ["", f"{MARK} lacks a part, or needs what only some runs provide: jaxrl algorithms NAME says what."]
    return "\n".join(text).lstrip("\n")


def by_stage() -> dict[str, list[str]]:
    """The names of all methods by stage, in order; families without a stage come last."""
    family = {name: module.__name__.rpartition(".")[2] for module in FAMILIES for name in module.__all__}
    found = {stage: [n for n in names() if family.get(n) in of_stage] for stage, of_stage in STAGES.items()}
    rest = [name for name in CATALOGUE if not any(name in methods for methods in found.values())]
    return found | ({"Others": sorted(rest)} if rest else {})


def _line(card: Card, width: int) -> str:
    mark = MARK if missing(card.name) else " "
    named = dict.fromkeys(PLAIN.get(x.partition(":")[0], x) for x in card.needs if x not in COMPUTED)
    needs = f"  [needs {', '.join(named)}]" if named else ""
    return f"  {card.name:{width}} {mark} {card.year}  {card.title}{needs}"


def _searched(name: str) -> str:
    build = constructor(name)
    return " ".join([name, inspect.getdoc(build) or "", *inspect.signature(build).parameters, *get(name).needs]).lower()


def page(name: str) -> str:
    """The page of a method: equations, missing parts, hyper-parameters, needs, outputs, composition and test."""
    build = constructor(name)
    text = inspect.getdoc(build) or ""
    if origins(text):
        text = text.rpartition("\n\n")[0]
    paragraphs = [f"{name}\n\n{text}"]
    if lacks := missing(name):
        paragraphs.append(
            f"Incomplete in some runs; to train without: --algorithm.without {','.join(lacks)}\n" + _lacks(lacks)
        )
    if beside := BESIDES.get(name):
        paragraphs.append("Also in the paper, but not implemented:\n" + _lacks(beside))
    paragraphs += [
        "Hyper-parameters (--algorithm.NAME VALUE; the run fills in its own where they are None):\n" + _table(name),
        "Needs beyond a sampled and scored batch:\n" + _needs(name),
        "Outputs:\n" + _outputs(name),
        "Composition:\n\n" + composition(build).rstrip(),
    ]
    if proof(name):
        paragraphs.append(f"Tested by: {proof(name)}")
    return "\n\n".join(paragraphs)


def _table(name: str) -> str:
    """One line per hyper-parameter: default, valid values, origin, and its values in presets."""
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
    return "\n".join(f"  {need}: {need_of(need).text}" for need in method_card(name).needs) or "  nothing"


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
