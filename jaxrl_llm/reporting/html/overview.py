"""What a report says of each run, and of several side by side: the settings that differ from the defaults first."""

import html
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.reporting.html.curves import folder_names
from jaxrl_llm.reporting.html.run_data import RunData
from jaxrl_llm.reporting.html.verdict import change_text, held_out, outcomes, p_text, verdict, warnings
from jaxrl_llm.reporting.statistics import paired_difference

Defaults = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def overview(run: RunData, defaults: Defaults | None) -> dict[str, Any]:
    """What a report says of each run: the verdict, warnings, facts, evaluations and settings."""
    return {
        "name": run.name,
        "verdict": verdict(run, held_out(run)),
        "warnings": warnings(run),
        "config": run.config,
        "summary": run.summary,
        "steps": len(run.steps),
        "changed": [] if defaults is None else changed_settings(run.config, defaults(run.config)),
        "facts": _facts(run),
    }


def _facts(run: RunData) -> list[tuple[str, str]]:
    """Numbers of a run that are worth a glance: start and end of reward, entropy and the share of uniform groups."""
    found = []
    for label, key in (
        ("reward", "reward/mean"),
        ("groups without signal", "groups/uniform"),
        ("entropy, nats", "entropy"),
        ("tokens a completion", "completion/length"),
    ):
        values = run.metric(key)
        if values.size:
            part = max(1, len(values) // 10)
            ends = values[:part].mean(), values[-part:].mean()
            found.append((label, " \u2192 ".join(f"{x:.0%}" if key == "groups/uniform" else f"{x:.3g}" for x in ends)))
    return found


def side_by_side(runs: Sequence[RunData], defaults: Defaults | None) -> dict[str, Any]:
    """The parts of a report that only several runs have: their settings and their results side by side."""
    return {
        "runs": [overview(run, defaults) for run in runs],
        "differing": differing_settings([run.config for run in runs]),
        "against": [against for run in runs[1:] if (against := _against(runs[0], run)) is not None],
    }


def _against(first: RunData, other: RunData) -> dict[str, Any] | None:
    """The held-out accuracy of two runs after training on the same prompts; None if they are not the same."""
    ends = [[row for row in run.rows if row.phase == "eval_after"] for run in (first, other)]
    found = outcomes(*ends)
    total = sum(found.counts)
    if not total or any(len({row.prompt_id for row in rows}) != total for rows in ends):
        return None
    texts = [
        {line["prompt_id"]: line.get("prompt") for line in run.read(rows).values()}
        for run, rows in zip((first, other), ends, strict=True)
    ]
    if texts[0] != texts[1]:
        return None
    difference, low, high, p = paired_difference(*found.counts)
    names = folder_names([first, other])
    return {
        "names": names, "total": total, "only_first": found.counts[2], "only_other": found.counts[1],
        "change": change_text(difference, low, high), "p": p_text(p), "significant": p < 0.05 and low * high > 0,
    }  # fmt: skip


# Where a run is and was started, which say nothing about it.
_PLACES = ("output", "started_in")
_LONGEST = 24  # characters that stay on one line, if nothing between them may break


class Setting(NamedTuple):
    """A setting by its dotted name."""

    name: str
    value: Any
    default: Any


def changed_settings(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[Setting]:
    """The settings of a run that are not those of `defaults`, a nested mapping like `config`, in the order of `config`.

    >>> changed_settings({"seed": 1, "optimizer": {"beta1": 0.8}}, {"seed": 1, "optimizer": {"beta1": 0.9}})
    [Setting(name='optimizer.beta1', value=0.8, default=0.9)]
    """
    known = flat(defaults)
    return [
        Setting(name, value, known[name])
        for name, value in flat(config).items()
        if name in known and name not in _PLACES and _plain(value) != _plain(known[name])
    ]


def differing_settings(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """The settings that differ between runs: (dotted name, its value in each run, None where it has none)."""
    all_of = [flat(config) for config in configs]
    names = dict.fromkeys(name for one in all_of for name in one if name not in _PLACES)
    found = [(name, [one.get(name) for one in all_of]) for name in names]
    return [(name, values) for name, values in found if any(_plain(x) != _plain(values[0]) for x in values[1:])]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping by dotted names; empty mappings are values.

    >>> flat({"a": 1, "b": {"c": 2, "d": {}}})
    {'a': 1, 'b.c': 2, 'b.d': {}}
    """
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Any]] = [(f"{prefix}{name}", value) for name, value in config.items()]
    while waiting:  # not recursive: a damaged file may nest deeper than Python's stack
        name, value = waiting.pop(0)
        if isinstance(value, Mapping) and value:
            waiting[:0] = [(f"{name}.{inner}", one) for inner, one in value.items()]
        else:
            found[name] = value
    return found


def breakable(text: Any) -> str:
    """A name, path or value as HTML whose lines break between its parts, and within a part only if that is very long.

    >>> breakable("max_new_tokens")
    'max_<wbr>new_<wbr>tokens'
    """
    parts = re.sub(r"(?<=[/_.:,=])(?=[^\W\d_])", "\0", str(text))
    return html.escape(re.sub(rf"(\w{{{_LONGEST}}})(?=\w)", "\\1\0", parts)).replace("\0", "<wbr>")


def _plain(value: Any) -> Any:
    """A value that compares as it would from JSON."""
    return list(value) if isinstance(value, tuple) else value
