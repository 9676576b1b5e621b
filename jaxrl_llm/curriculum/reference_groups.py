"""Groups that a step samples for its curriculum alone, which measures how hard their prompts are."""

from __future__ import annotations

import numpy as np

from jaxrl_llm.core.source import ONLY_MEASURED, Step
from jaxrl_llm.replay.buffers import take, to_rows, to_scored
from jaxrl_llm.rewards.scoring import Scored


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
