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


def mean_by_prompt(prompt_id: Array, values: Array) -> tuple[Array, Array, Array]:
    """(prompts int64[n], ascending; values of each that are not NaN, at least 1; their mean f64[n]) of rows."""
    known = ~np.isnan(values)
    ids, place = np.unique(np.asarray(prompt_id, np.int64)[known], return_inverse=True)
    count = np.bincount(place, minlength=len(ids))
    return ids, count, np.bincount(place, values[known], len(ids)) / np.maximum(count, 1)


def results_of(step: Step) -> Results:
    """The results of a step; rows without a score are ignored."""
    batch = step.scored.batch
    reward = np.clip(np.asarray(batch.need("reward"), np.float64), 0.0, 1.0)
    ids, samples, mean = mean_by_prompt(np.asarray(batch.prompt_id), reward)
    known, best = ~np.isnan(reward), np.zeros(len(ids))
    np.maximum.at(best, np.searchsorted(ids, np.asarray(batch.prompt_id)[known]), reward[known])
    return Results(ids, samples, mean, best)
