"""Groups of a step that are not trained on: those without a learning signal, and those that only measure difficulty."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_llm.core.rules import DynamicSampling
from jaxrl_llm.core.source import ONLY_MEASURED, Step
from jaxrl_llm.replay.buffers import take, to_rows, to_scored
from jaxrl_llm.rewards.groups import concatenate_groups, some_rows
from jaxrl_llm.rewards.scoring import Scored
from jaxrl_llm.rollouts.runtime.collate import rows_of
from jaxrl_llm.rollouts.runtime.group_run import Group

WITHOUT_SIGNAL = "no signal"  # why a group is left out

_Group = tuple[Scored, list[dict[str, Any]]]


class Resampling:
    """The groups of the rounds of a step, until `wanted` of them are informative or the rule has no more rounds."""

    def __init__(self, rule: DynamicSampling, wanted: int) -> None:
        self.rule, self.wanted, self.rounds = rule, wanted, 0
        self._kept, self._spare = list[_Group](), list[_Group]()
        self._others: list[tuple[Scored, str]] = []

    def add(self, groups: Sequence[Group], scored: Scored) -> np.ndarray:
        """Take the groups of a round. Returns which of them are informative, bool[groups]."""
        ends = np.cumsum([len(one.episodes) for one in groups]).tolist()
        starts = [0, *ends[:-1]]
        good = np.logical_or.reduceat(np.asarray(self.rule.informative(scored.batch)), starts)
        parts = [
            (some_rows(scored, i, slice(*place)), rows_of([one]))
            for i, (*place, one) in enumerate(zip(starts, ends, groups, strict=True))
        ]
        self._kept += [one for one, fine in zip(parts, good, strict=True) if fine]
        self._others += [(one, WITHOUT_SIGNAL) for one, _ in self._spare]
        self._spare = [one for one, fine in zip(parts, good, strict=True) if not fine]
        self.rounds += 1
        return good

    @property
    def missing(self) -> int:
        """Groups that the next round is to replace; 0: the step is complete."""
        return 0 if self.rounds >= self.rule.rounds else max(self.wanted - len(self._kept), 0)

    def step(self, metrics: Mapping[str, float]) -> Step:
        """The step: informative groups, filled up with others of the last round."""
        chosen = (self._kept + self._spare)[: self.wanted]
        others = [*self._others, *((one, "more than a step needs") for one, _ in self._kept[self.wanted :])]
        others += [(one, WITHOUT_SIGNAL) for one, _ in self._spare[max(self.wanted - len(self._kept), 0) :]]
        rows = [row for _, some in chosen for row in some]
        scored = concatenate_groups([one for one, _ in chosen])
        return Step(scored, rows, {**metrics, "rounds": float(self.rounds)}, others=others)


def without_references(found: Step) -> Step:
    """The step without the groups that are `ONLY_MEASURED`, as their rows say, which are in `others` as "reference".

    A step trains on one group at least: nothing is left out if all groups would be.
    """
    out = np.array([bool(row.get(ONLY_MEASURED)) for row in found.rows])
    if out.all() or not out.any():
        return found
    batch = found.scored.batch
    group = np.asarray(batch.group)
    numbers, rows = np.unique(group), to_rows(found.scored)

    def of(chosen: np.ndarray) -> Scored:
        index = np.flatnonzero(np.isin(group, numbers[chosen]))
        _, consecutive = np.unique(group[index], return_inverse=True)
        some = to_scored(take(rows, index), consecutive, batch.tokens.shape[1], found.scored.failures)
        return found.scored._replace(batch=some.batch, texts=some.texts)

    kept = [row for row, is_out in zip(found.rows, out, strict=True) if not is_out]
    return found._replace(scored=of(~out), rows=kept, others=(*found.others, (of(out), "reference")))
