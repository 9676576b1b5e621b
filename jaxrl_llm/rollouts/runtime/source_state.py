"""The state of the standard source, and what a checkpoint holds of it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.rollouts.runtime.replay_log import GroupKey, Held, Pool, from_arrays, to_arrays
from jaxrl_llm.sampling.speculative.drafts import Drafts

# Before the names of their arrays in a checkpoint; those of the pool have none.
REPLAY, DRAFTS, CURRICULUM = "replay_", "drafts_", "curriculum_"


class ExperienceState(NamedTuple):
    """State of the standard source."""

    curriculum: Any
    replay: dict[str, np.ndarray]
    pool: Pool  # groups that continue in the next step
    drafts: Drafts  # completions of earlier steps, for speculation
    controls: Mapping[str, float] = MappingProxyType({})  # of the last update, see `Source.on_update`
    held: Mapping[GroupKey, Held] = MappingProxyType({})  # by the programs of the pool, on this host; not saved


def saved(state: ExperienceState) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A JSON object, and arrays by name."""
    curriculum, arrays = _apart(state.curriculum)
    parts = {REPLAY: state.replay, CURRICULUM: arrays, DRAFTS: state.drafts.to_arrays() if state.drafts.of else {}}
    named = {prefix + name: x for prefix, part in parts.items() for name, x in part.items()}
    controls = {"controls": dict(state.controls)} if state.controls else {}
    return {"curriculum": curriculum, **controls}, (to_arrays(state.pool) if state.pool else {}) | named


def loaded(saved: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> ExperienceState:
    """The inverse of `saved`."""

    def of(prefix: str) -> dict[str, np.ndarray]:
        return {name.removeprefix(prefix): x for name, x in arrays.items() if name.startswith(prefix)}

    curriculum = saved["curriculum"]
    if own := of(CURRICULUM):
        curriculum = {**curriculum, **own}
    pool = {name: x for name, x in arrays.items() if not name.startswith((REPLAY, DRAFTS, CURRICULUM))}
    drafts, controls = Drafts.from_arrays(of(DRAFTS)), saved.get("controls", {})
    return ExperienceState(curriculum, of(REPLAY), from_arrays(pool), drafts, controls)


def _apart(state: Any) -> tuple[Any, dict[str, np.ndarray]]:
    """A curriculum's state as a JSON value and arrays."""
    if not isinstance(state, dict):
        return state, {}
    arrays = {name: x for name, x in state.items() if isinstance(x, np.ndarray)}
    return {name: x for name, x in state.items() if name not in arrays}, arrays
