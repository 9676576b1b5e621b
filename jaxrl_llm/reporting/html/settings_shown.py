"""The settings of runs as a report shows them: what differs from the defaults first, and what differs between runs."""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
