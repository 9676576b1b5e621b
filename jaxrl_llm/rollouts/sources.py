"""Sources of batches, curricula and replay: state machines of pure functions, like a `Transform`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxrl_llm.data.stream import PromptStream
from jaxrl_llm.models.policy import Params
from jaxrl_llm.rewards.scoring import Scored

State = Any


class Step(NamedTuple):
    """The batch that a step trains on, its prompts, and metrics."""

    scored: Scored
    rows: list[dict[str, Any]]  # the data set row of each group
    metrics: dict[str, float]


class Source(NamedTuple):
    """Supplies the loop with batches.

    init: () -> state.
    next: (state, params, key, step) -> (Step, state). params: of the policy; key: of this step.
    save: state -> (JSON object, arrays), for a checkpoint. load: the inverse; InputError if they were saved with other
    inputs.
    """

    init: Callable[[], State]
    next: Callable[[State, Params, jax.Array, int], tuple[Step, State]]
    save: Callable[[State], tuple[dict[str, Any], dict[str, np.ndarray]]]
    load: Callable[[Mapping[str, Any], Mapping[str, np.ndarray]], State]
    provides: frozenset[str] = frozenset()
    """What its batches have beyond tokens and rewards, of the names in `jaxrl_llm.needs`."""


class Curriculum(NamedTuple):
    """Selects prompts.

    init: () -> state, a JSON value.
    select: (state, count) -> (prompt ids int32[count], state).
    observe: (state, Step) -> state, updated with the results of a step.
    """

    init: Callable[[], State]
    select: Callable[[State, int], tuple[np.ndarray, State]]
    observe: Callable[[State, Step], State]


class Replay(NamedTuple):
    """Mixes past trajectories into a batch.

    init: () -> state, arrays by name, which are saved in checkpoints. mix: (state, Scored) -> (Scored, state).
    """

    init: Callable[[], dict[str, np.ndarray]]
    mix: Callable[[dict[str, np.ndarray], Scored], tuple[Scored, dict[str, np.ndarray]]]


def shuffled_epochs(rows: list[dict[str, Any]], seed: int) -> Curriculum:
    """Epochs over all prompts, each in a new random order."""
    stream = PromptStream(rows, batch_size=1, seed=seed)
    start = stream.state()

    def select(state: State, count: int) -> tuple[np.ndarray, State]:
        if stream.state() != state:
            stream.restore(state)
        ids = [next(stream)[1] for _ in range(count)]
        return np.concatenate([np.zeros(0, np.int32), *ids]), stream.state()

    return Curriculum(lambda: start, select, lambda state, step: state)


def no_replay() -> Replay:
    """No replay: batches stay as they are."""
    return Replay(dict, lambda state, scored: (scored, state))
