"""The results of a step by prompt, as curricula read them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.core.source import Step

Array = np.ndarray[Any, Any]


class Results(NamedTuple):
    """The results of a step: n distinct prompts, ascending, each with the rewards of its samples."""

    ids: Array
    """int64[n]"""
    samples: Array
    """int64[n]: scored samples, at least 1."""
    mean: Array
    """f64[n]: their mean reward, each reward clipped to [0, 1]."""
    best: Array
    """f64[n]: their largest reward, clipped likewise."""


def results_of(step: Step) -> Results:
    """The results of a step; rows without a score are ignored."""
    batch = step.scored.batch
    reward = np.asarray(batch.need("reward"), np.float64)
    known = ~np.isnan(reward)
    ids, place = np.unique(np.asarray(batch.prompt_id, np.int64)[known], return_inverse=True)
    clipped = np.clip(reward[known], 0.0, 1.0)
    samples = np.bincount(place, minlength=len(ids))
    best = np.zeros(len(ids))
    np.maximum.at(best, place, clipped)
    return Results(ids, samples, np.bincount(place, clipped, len(ids)) / np.maximum(samples, 1), best)
