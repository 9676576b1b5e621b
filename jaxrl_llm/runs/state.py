"""A run's state is one value; a checkpoint holds it, and where the run was, whole."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxrl_llm.distributed import replicate
from jaxrl_llm.errors import InputError
from jaxrl_llm.learner.diagnose import NotFiniteError, not_finite_in
from jaxrl_llm.learner.update import TrainState
from jaxrl_llm.rollouts.sources import Source
from jaxrl_llm.runs.changes import ACCEPT, check_changes, settings_to_compare
from jaxrl_llm.runs.checkpoints import Checkpoints
from jaxrl_llm.runs.config import TrainConfig
from jaxrl_llm.runs.run_folder import Clock, RunFolder
from jaxrl_llm.runs.setup import Parts


class RunState(NamedTuple):
    """All that a step changes."""

    train: TrainState
    memory: Any  # of the method's transform
    source: Any


@dataclass
class Course:
    """Where a run is, and what it has to tell by then."""

    step: int = 0
    """Steps taken."""
    counts: dict[str, int] = field(default_factory=dict)
    feedback: dict[str, float] = field(default_factory=dict)
    """Metrics of the last update."""
    summary: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    """Notes on what was found at the start."""


def save(
    state: RunState, course: Course, source: Source, checkpoints: Checkpoints, folder: RunFolder, clock: Clock,
    record: dict[str, Any],
) -> None:  # fmt: skip
    """Begin to write a checkpoint. NotFiniteError where a number of the state is not finite: then nothing is written.

    record: settings and digests, which a run that goes on must share.
    """
    if name := not_finite_in({"parameters": state.train.params, "moments": state.train.optimizer}):
        raise NotFiniteError(
            f"step {course.step}: {name} is not finite; nothing of step {course.step} is saved, and the checkpoints in "
            f"{folder.checkpoints} are good"
        )
    saved, arrays = source.save(state.source)
    meta = {"source": saved, "counts": course.counts, "feedback": course.feedback, "seconds": clock.seconds}
    meta |= {"logs": folder.logs(), "summary": course.summary, **record}
    rest = {"rest": state.train[1:], "memory": state.memory}
    checkpoints.save(course.step, state.train.params, rest, meta, arrays)


def record_of(config: TrainConfig, parts: Parts) -> dict[str, Any]:
    """What a checkpoint says of the run's settings and inputs."""
    return {"settings": settings_to_compare(config, os.getcwd()), "inputs": parts.digests}


def restore(
    state: RunState, source: Source, config: TrainConfig, parts: Parts, checkpoints: Checkpoints, folder: RunFolder,
    clock: Clock, accept_changed_inputs: bool,
) -> tuple[RunState, Course]:  # fmt: skip
    """The state of the newest checkpoint and the course of the run by then; both as they are where there is none.

    Raises InputError where it cannot go on, before anything is changed; then logs are cut back to the checkpoint.
    """
    course = Course()

    def changes(meta: dict[str, Any]) -> list[str]:
        return check_changes(meta, config, os.getcwd(), parts.digests, accept_changed_inputs)

    now = {"rest": state.train[1:], "memory": state.memory}
    restored = checkpoints.latest(state.train.params, now, check=changes)
    course.summary = folder.read_summary()
    logs: dict[str, Any] = {}
    if restored:
        meta = restored.meta
        course = Course(restored.step, meta["counts"], meta["feedback"], meta.get("summary", course.summary))
        course.remarks, logs = changes(meta), meta.get("logs", {})
        if course.step > config.steps:
            raise InputError(f"the checkpoint is of step {course.step}, but steps is {config.steps}: raise it to go on")
        rest, memory = replicate((restored.state["rest"], restored.state["memory"]), parts.mesh)
        train, at = TrainState(replicate(restored.params, parts.mesh), *rest), state.source
        try:
            at = source.load(meta["source"], restored.arrays)
        except InputError as error:  # there are more prompts, or fewer
            if not accept_changed_inputs:
                raise
            course.remarks.append(f"the prompts are drawn from the beginning of an epoch ({error})")
        state = RunState(train, memory, at)
        clock.seconds |= {"load": clock.seconds["load"] + meta["seconds"].pop("load", 0.0)}
        clock.seconds |= meta["seconds"]
    wrong = folder.check_logs(course.step, config.checkpoint_every, logs)
    if wrong and not accept_changed_inputs:
        raise InputError(f"{'; '.join(wrong)}. Nothing was changed; {ACCEPT} goes on all the same")
    # Only now, when nothing can be refused any more.
    course.remarks += wrong
    course.remarks += [f"a damaged checkpoint is now {path}" for path in checkpoints.set_aside_after(course.step)]
    return state, course
