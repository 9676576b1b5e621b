"""The state of a run as one value, and how a checkpoint saves and restores it."""

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax

from jaxrl_llm.core.source import Source
from jaxrl_llm.learner.nonfinite import NotFiniteError, not_finite_in
from jaxrl_llm.learner.train_state import TrainState
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.folder.checkpoints import Checkpoints, Restored
from jaxrl_llm.training.folder.files import RunFolder
from jaxrl_llm.training.folder.resume_checks import ACCEPT, check_changes, log_digests, log_problems
from jaxrl_llm.training.health.goodput import Clock, lost_time
from jaxrl_llm.training.health.loss_spikes import History, as_history
from jaxrl_llm.training.setup import RunParts
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.process import Preempted


class RunState(NamedTuple):
    """Everything that a step updates."""

    train: TrainState
    memory: Any  # state of the method's transform
    source: Any  # state of the source
    policies: Mapping[str, Any] = {}  # that move beside the one that learns, by name, see `reference.first_policies`


@dataclass
class LoopState:
    """The loop's bookkeeping on the host, saved beside the `RunState`."""

    step: int = 0
    """Steps taken."""
    counts: dict[str, int] = field(default_factory=dict)
    """See `metrics.count_step`."""
    feedback: dict[str, float] = field(default_factory=dict)
    """Metrics of the last update."""
    summary: dict[str, Any] = field(default_factory=dict)
    """Contents of summary.json."""
    notes: list[str] = field(default_factory=list)
    """Lines to print on resume."""
    spikes: History = field(default_factory=History)
    """See `spikes`."""
    undone: float = 0.0
    """Useful seconds whose updates were rolled back."""


def save(
    state: RunState, loop: LoopState, source: Source, checkpoints: Checkpoints, folder: RunFolder, clock: Clock,
    provenance: dict[str, Any],
) -> None:  # fmt: skip
    """Start writing a checkpoint. Raises NotFiniteError, and writes nothing, if the state is not finite.

    provenance: settings and digests of the inputs, which a resumed run must share. Of a folder at a URL, the checkpoint
    is written to its end, after the logs, and copied there while the run goes on.
    """
    if name := not_finite_in({"parameters": state.train.params, "moments": state.train.optimizer}):
        raise NotFiniteError(
            f"step {loop.step}: {name} is not finite; nothing of step {loop.step} is saved, and the checkpoints in "
            f"{folder.checkpoints} are good"
        )
    saved, arrays = source.save(state.source)
    meta: dict[str, Any] = {"source": saved, "counts": loop.counts, "feedback": loop.feedback, "seconds": clock.seconds}
    meta |= {"saved": time.time(), "spikes": loop.spikes._asdict(), "undone": loop.undone}
    meta |= {"logs": log_digests(folder.logs), "summary": loop.summary, **provenance}
    rest = _rest(state)
    folder.push()
    folder.wait()
    checkpoints.save(loop.step, state.train.params, rest, meta, arrays)
    if folder.mirror:
        checkpoints.wait()
        folder.push()


@contextmanager
def saved_when_preempted(loop: LoopState, checkpoints: Checkpoints, save_now: Callable[[], None]) -> Iterator[None]:
    """Context manager that saves the steps taken, unless they are saved, when Preempted is raised in it."""
    try:
        yield
    except Preempted:
        checkpoints.wait()
        if loop.step > max(checkpoints.steps(), default=0):
            save_now()
            checkpoints.wait()
        raise


def restore(
    state: RunState, source: Source, config: TrainConfig, parts: RunParts, checkpoints: Checkpoints, folder: RunFolder,
    clock: Clock, accept: bool,
) -> tuple[RunState, LoopState]:  # fmt: skip
    """The run's state and the loop's at the newest checkpoint; without checkpoints, `state` and a new `LoopState`.

    Raises InputError, before anything is changed, if the run cannot be resumed. Moves newer, damaged checkpoints aside.
    """
    loop = LoopState()
    changes = partial(check_changes, config=config, folder=os.getcwd(), digests=parts.digests, accept=accept)
    params, rest = shapes_of_state(state)
    if checkpoints.steps():  # the new state is not needed: make room for the one that is read
        jax.tree.map(lambda x: x.delete(), (state.train, state.memory, state.policies))
    restored = checkpoints.latest(params, rest, check=changes)
    loop.summary = folder.read_summary()
    logs: dict[str, Any] = {}
    if restored:
        meta = restored.meta
        loop = LoopState(restored.step, meta["counts"], meta["feedback"], meta.get("summary", loop.summary))
        loop.notes, logs = changes(meta), meta.get("logs", {})
        if "spikes" in meta:  # older checkpoints lack these
            loop.spikes, loop.undone = as_history(meta["spikes"]), meta["undone"]
        if (step := loop.step) > config.steps:
            raise InputError(f"the checkpoint is of step {step}, but steps is {config.steps}: raise steps to resume")
        at = state.source
        try:
            at = source.load(meta["source"], restored.arrays)
        except InputError as error:  # the number of prompts has changed
            if not accept:
                raise
            loop.notes.append(f"the prompts are drawn from the beginning of an epoch ({error})")
        state = restored_state(restored, at)
        ended = "steps_without_signal" in folder.read_summary()  # by itself: nothing was lost, and nobody waited
        lost = {} if ended or "saved" not in meta else lost_time(meta["saved"], folder.last_write(), clock.began)
        clock.go_on(meta["seconds"], lost)
    wrong = log_problems(folder.logs, loop.step, config.checkpoint_every, logs, folder.checkpoints)
    if wrong and not accept:
        raise InputError(f"{'; '.join(wrong)}. Nothing was changed; {ACCEPT} resumes anyway")
    # The folder is modified only after all checks have passed.
    loop.notes += wrong
    loop.notes += [f"a damaged checkpoint is now {path}" for path in checkpoints.set_aside_after(loop.step)]
    folder.record_composed(parts.record)
    return state, loop


def shapes_of_state(state: RunState) -> tuple[Any, Any]:
    """Shapes, with their shardings, of the parameters and of the rest of the state, as `Checkpoints.latest` asks."""
    now = (state.train.params, _rest(state))
    params, rest = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), now)
    return params, rest


def restored_state(restored: Restored, source: Any) -> RunState:
    """The state in a checkpoint, with this state of the source."""
    rest = dict(restored.state)
    train, memory = TrainState(restored.params, *rest.pop("rest")), rest.pop("memory")
    return RunState(train, memory, source, rest)


def _rest(state: RunState) -> dict[str, Any]:
    """What a checkpoint holds beside the parameters and the source's state."""
    return {"rest": state.train[1:], "memory": state.memory, **state.policies}
