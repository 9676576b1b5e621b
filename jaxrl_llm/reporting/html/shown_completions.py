"""Which completions a report shows: cards of groups from training, and held-out prompts before and after."""

import math
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.reporting.html.conversations import marks
from jaxrl_llm.reporting.html.run_data import Row, RunData
from jaxrl_llm.reporting.html.shading import KINDS, shaded_tokens
from jaxrl_llm.reporting.html.verdict import Outcomes
from jaxrl_llm.reporting.statistics import typical_size

CHANGES, KNOWN_ONCE = ("rose", "fell", "stayed"), "is known once"  # of the reward of a held-out prompt
SHARED = 80  # characters that prompts have in common, from which on a card begins with what differs
TOKENS = 25_000  # tokens shown in total, about 2.5 MB of HTML
_STEPS, _PROMPTS, _SAMPLES = 8, 4, 8  # of training: steps, prompts of each, samples of each
_EXAMPLES = 6  # held-out prompts of each kind of outcome
_SQUARES = 1_000  # held-out prompts with a square of their own


class _Group(NamedTuple):
    """The samples of a group of a prompt in a step."""

    step: int
    prompt_id: int
    number: int  # in the step
    rows: list[Row]

    @property
    def shown(self) -> list[Row]:
        """The samples that are shown."""
        return self.rows[:_SAMPLES]

    @property
    def known(self) -> list[float]:
        """The rewards that are known."""
        return [row.reward for row in self.rows if math.isfinite(row.reward)]

    @property
    def kind(self) -> str:
        """ "mixed" if rewards differ; else "right", "wrong", or "unscored"."""
        if not self.known:
            return "unscored"
        if self.spread:
            return "mixed"
        return "right" if all(row.correct for row in self.rows) else "wrong"

    @property
    def mean(self) -> float:
        """The mean of the known rewards; NaN if there are none."""
        return sum(self.known) / len(self.known) if self.known else math.nan

    @property
    def spread(self) -> float:
        """The largest reward minus the smallest; 0 if there are none."""
        return max(self.known) - min(self.known) if self.known else 0.0

    @property
    def samples(self) -> int:
        """How many samples there are: the rows of an episode are one."""
        return sum(row.row == 0 for row in self.rows)

    @property
    def length(self) -> float:
        """Mean length of the samples in tokens."""
        return sum(row.length for row in self.rows) / max(self.samples, 1)

    @property
    def correct(self) -> int:
        """How many samples are correct."""
        return sum(bool(row.correct) for row in self.rows if row.row == 0)


class Examples(NamedTuple):
    """Held-out prompts by kind of outcome: their number, and the pairs (before, after) that are shown."""

    kind: str
    total: int
    pairs: list[tuple[Row | None, Row | None]]


def training_groups(rows: Iterable[Row]) -> list[_Group]:
    """The groups of the training samples, by step, in the order of the file."""
    found: dict[tuple[int, int, int], list[Row]] = defaultdict(list)
    for row in rows:
        if row.phase == "train":
            found[row.step, row.prompt_id, row.group].append(row)
    return sorted((_Group(*key, own) for key, own in found.items()), key=lambda group: group.step)


def chosen_groups(groups: Sequence[_Group]) -> list[_Group]:
    """Groups of some steps, evenly spaced; within a step, groups whose rewards differ come first."""
    by_step: dict[int, list[_Group]] = defaultdict(list)
    for group in groups:
        by_step[group.step].append(group)
    steps = sorted(by_step)
    places = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _STEPS)).astype(int))
    return [
        group
        for place in places
        for group in sorted(by_step[steps[place]], key=lambda group: group.kind != "mixed")[:_PROMPTS]
    ]


def held_out_examples(rows: Sequence[Row], found: Outcomes) -> list[Examples]:
    """Examples of each kind of outcome, and of prompts without one: known once, or without a judging reward.

    Where no completion is correct, kinds are by the change of the reward instead.
    """
    kinds: dict[str, list[Any]] = {name: getattr(found, name) for name in ("fixed", "broken", "wrong", "right")}
    if not (found.right or found.fixed or found.broken):
        kinds = {change: [] for change in (*CHANGES, KNOWN_ONCE)}
        for pair in found.wrong:
            kinds[_change(*pair)].append(pair)
    half_known = kinds.pop(KNOWN_ONCE, [])
    before, after = _evaluated(rows)
    others = sorted((before.keys() | after.keys()) - {first.prompt_id for pairs in found for first, _ in pairs})
    kinds["known once"] = half_known + [(before.get(prompt), after.get(prompt)) for prompt in others]
    return [Examples(kind, len(pairs), pairs[:_EXAMPLES]) for kind, pairs in kinds.items() if pairs]


def reward_changes(rows: Sequence[Row]) -> dict[str, int]:
    """On how many held-out prompts the reward rose, fell or stayed, and of how many it is known once."""
    before, after = _evaluated(rows)
    counts = dict.fromkeys((*CHANGES, KNOWN_ONCE), 0)
    for prompt in before.keys() | after.keys():
        counts[_change(before.get(prompt), after.get(prompt))] += 1
    return {change: count for change, count in counts.items() if count}


def squares(found: Outcomes) -> list[tuple[int, str]]:
    """(prompt, kind of outcome) of held-out prompts in the order of their ids, at most _SQUARES."""
    named = zip(("right", "fixed", "broken", "wrong"), found, strict=True)
    return sorted((first.prompt_id, kind) for kind, pairs in named for first, _ in pairs)[:_SQUARES]


def shaded_samples(
    run: RunData, parts: Mapping[str, Sequence[Row]]
) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
    """Completions with their HTML, by offset, and for each part the range of each kind of value, best kind first.

    parts: rows by the section that shows them. Sections have ranges of their own, and begin with a kind that has
    something to shade: advantages if any is not 0.
    """
    total = sum(len(rows) for rows in parts.values())
    samples = run.read(chain.from_iterable(parts.values()))
    limits: dict[str, dict[str, float]] = {}
    for part, rows in parts.items():
        own = [samples[row.offset] for row in rows]
        given = [kind for kind in KINDS if any(sample.get(kind) for sample in own)]
        columns = {kind: [x for sample in own for x in sample.get(kind) or ()] for kind in given}
        shown = sorted(given, key=lambda kind: not any(columns[kind]))  # stable: kinds that are all 0 go last
        limits[part] = {kind: typical_size(columns[kind]) for kind in shown}
        for sample in own:
            values = {kind: sample[kind] for kind in given if sample.get(kind)}
            most = max(60, TOKENS // total)
            sample["html"] = shaded_tokens(sample["tokens"], values, limits[part], most=most, between=marks(sample))
    return samples, limits


def shared_beginning(texts: Iterable[str]) -> int:
    """How many characters all of several prompts begin with, such as examples before the question; 0 if they are few.

    >>> shared_beginning([f"{'Add. ' * 20}What is {number}?" for number in (1, 2)])
    108
    """
    different = set(texts)
    common = os.path.commonprefix(list(different)) if len(different) > 1 else ""  # noqa: RUF071 (of any texts)
    end = max(common.rfind(" "), common.rfind("\n")) + 1
    return end if end >= SHARED else 0


def _evaluated(rows: Sequence[Row]) -> tuple[dict[int, Row], ...]:
    """The first completion of each held-out prompt before training, and those after it."""
    phases = ("eval_before", "eval_after")
    return tuple({row.prompt_id: row for row in reversed(rows) if row.phase == phase} for phase in phases)


def _change(before: Row | None, after: Row | None) -> str:
    first, last = (math.nan if row is None else row.reward for row in (before, after))
    return "rose" if last > first else "fell" if last < first else "stayed" if last == first else KNOWN_ONCE
