"""Sources of batches, curricula and replay: state machines of pure functions, like a `Transform`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from jaxrl_llm.core.repr import layout
from jaxrl_llm.core.trajectory import Array, Trajectories

if TYPE_CHECKING:
    from jaxrl_llm.models.policy import Params
    from jaxrl_llm.rewards.scoring import Scored

State = Any
ONLY_MEASURED = "only_measured"  # a column that a curriculum may give, see `Curriculum.columns`


class Step(NamedTuple):
    """The batch that a step trains on, its prompts, and metrics."""

    scored: Scored
    rows: list[dict[str, Any]]  # the data set row of each group
    metrics: dict[str, float]
    sampled: Scored | None = None  # the batch without replay, if rows were replayed
    others: Sequence[tuple[Scored, str]] = ()  # groups that were sampled and left out, each with the reason


class Beside(NamedTuple):
    """Programs that a source runs beside the loop's, in threads of its own; by default there are none."""

    paused: Callable[[], AbstractContextManager[None]] = nullcontext
    """Context manager in which they do not run."""
    close: Callable[[], None] = lambda: None
    """Called once the run has ended."""


class Source(NamedTuple):
    """Supplies the loop with batches.

    init: () -> state. next: (state, params, key, step) -> (Step, state). params: of the policy; key: of this step.
    save: state -> (JSON object, arrays), for a checkpoint. load: the inverse; InputError if they were saved with other
    inputs.
    """

    init: Callable[[], State]
    next: Callable[[State, Params, Array, int], tuple[Step, State]]
    save: Callable[[State], tuple[dict[str, Any], dict[str, np.ndarray]]]
    load: Callable[[Mapping[str, Any], Mapping[str, np.ndarray]], State]
    provides: frozenset[str] = frozenset()
    """What its batches have beyond tokens and rewards, of the names in `jaxrl_llm.core.needs`."""
    on_checkpoint: Callable[[State, int], np.ndarray | None] = lambda state, step: None
    """(state, steps) -> why each prompt is not drawn now, see `Curriculum`; None if every prompt is. Called before a
    checkpoint of so many steps is written: see `Replay.on_checkpoint`."""
    on_update: Callable[[State, Trajectories], State] = lambda state, batch: state
    """(state, the batch on the host as the method prepared it, filled up at its end) -> state, after the update. The
    method's controllers wrote `batch.controls`."""
    beside: Beside = Beside()
    """What it runs beside the loop."""


class Curriculum(NamedTuple):
    """Selects prompts, and how many samples each gets. A state is not changed: functions return new ones.

    init: () -> state, a JSON value, or a dict of JSON values and numpy arrays. select: (state, count) -> (prompt ids
    int32[count], state). With `counts` it may return another number of prompts, which then share count times the group
    size samples. observe: (state, Step) -> state, updated with the results of a step. counts: (state, prompt ids
    int32[n], total) -> samples int32[n] of each, at least 1, which add up to `total`; None: as many of each as a group
    has. metrics: state -> metrics for the log. excluded: state -> uint8[P], why each prompt is not drawn now
    (`excluded.Why`); None: every prompt is drawn. columns: (state, prompt ids int32[n]) -> of each prompt, columns that
    rollout programs find in its row in this step, beside those of the data set; None: no others. A group whose row has
    a true `ONLY_MEASURED` is sampled for `observe` alone: the step does not train on it. on_update: as that of a
    `Source`.
    """

    init: Callable[[], State]
    select: Callable[[State, int], tuple[np.ndarray, State]]
    observe: Callable[[State, Step], State]
    counts: Callable[[State, np.ndarray, int], np.ndarray] | None = None
    metrics: Callable[[State], dict[str, float]] = lambda state: {}
    excluded: Callable[[State], np.ndarray] | None = None
    columns: Callable[[State, np.ndarray], Sequence[Mapping[str, Any]]] | None = None
    on_update: Callable[[State, Trajectories], State] = lambda state, batch: state


MakeCurriculum = Callable[[Sequence[dict[str, Any]], int], Curriculum]  # (training rows, seed) -> Curriculum


@dataclass(frozen=True, repr=False)
class Replay:
    """Mixes past trajectories into a batch.

    init: () -> state, arrays by name, which are saved in checkpoints. mix: (state, Scored, step, seed) -> (Scored,
    state); seed: of this step, the same on all hosts, which see the same batch. metrics: state -> metrics for the log.
    """

    init: Callable[[], dict[str, np.ndarray]]
    mix: Callable[[dict[str, np.ndarray], Scored, int, int], tuple[Scored, dict[str, np.ndarray]]]
    provides: frozenset[str] = frozenset()
    """Names of `jaxrl_llm.core.needs` that its batches have, in every step."""
    metrics: Callable[[dict[str, np.ndarray]], dict[str, float]] = lambda state: {}
    grown: Callable[[int], int] = lambda rows: rows
    """The most rows of a mixed batch, of which so many were sampled; for `jaxrl plan`."""
    by_row: bool = False
    """Whether its state is of stores (`replay.buffers`), and `mix` reads no token, so that tokens may be on disk."""
    on_checkpoint: Callable[[dict[str, np.ndarray], int], None] = lambda state, step: None
    """Called with the state before a checkpoint of `step` steps is written: removes files that none needs."""
    on_update: Callable[[dict[str, np.ndarray], Trajectories], dict[str, np.ndarray]] = lambda state, batch: state
    """As that of a `Source`; the batch has the rows of the mixed one, in its order."""

    __repr__ = layout
