"""The beginning of a run, new or resumed, and its end, on all hosts alike."""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from typing import Any

from jaxrl_llm.algorithms import Given
from jaxrl_llm.core.arguments.checks import expect
from jaxrl_llm.core.source import Source
from jaxrl_llm.data.chat.rendering import today
from jaxrl_llm.distributed.hosts import all_hosts
from jaxrl_llm.plan.choose_mesh import with_mesh
from jaxrl_llm.rewards.specs import ENVIRONMENT
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.auto_dtype import with_dtype
from jaxrl_llm.training.config.hyperparameters import check_named
from jaxrl_llm.training.config.json_text import to_dict
from jaxrl_llm.training.config.method_settings import fitted
from jaxrl_llm.training.folder.checkpoints import Checkpoints
from jaxrl_llm.training.folder.files import RunFolder
from jaxrl_llm.training.folder.lock import locked
from jaxrl_llm.training.folder.resume_checks import settings_to_compare
from jaxrl_llm.training.health.goodput import Activity, Clock
from jaxrl_llm.training.health.oom import explained
from jaxrl_llm.training.health.watchdog import watched
from jaxrl_llm.training.inputs import Inputs, read_inputs
from jaxrl_llm.training.method import check_provided, named
from jaxrl_llm.training.other_policies.kept_reference import of_source, with_kept_reference
from jaxrl_llm.training.running import Running
from jaxrl_llm.training.setup import RunParts, set_up
from jaxrl_llm.training.source import OfRows, source_of, timed, with_embeddings
from jaxrl_llm.training.state import LoopState, RunState, restore
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.process import (
    Preempted,
    count_compiles,
    interruptible,
    limit_heap,
    preemptible,
    stop_if,
    use_compile_cache,
)
from jaxrl_llm.utils.starting import started


class UnwrittenFolder(RunFolder):
    """The run's folder for hosts other than the first, which write nothing into it."""

    def _nothing(self, *args: Any, **kwargs: Any) -> None:
        pass

    abandon = begin = rewind = write = log_completions = log_groups = write_left_out = push = _nothing


MakeSource = Callable[[RunParts], Source]
__all__ = ["Given", "Inputs", "MakeSource", "OfRows", "of_values", "prepared_run"]


def of_values(config: TrainConfig, algorithm: Given | None, values: Mapping[str, Any]) -> TrainConfig:
    """The configuration with a method, rewards, environment and tools that are given as values. Raises InputError."""
    expect("config", config, TrainConfig)
    changes = {name: value for name, value in values.items() if value is not None}
    if "rewards" in changes and config.eval_reward == ENVIRONMENT:
        changes["eval_reward"] = None  # it may be no longer among them
    config = fitted(named(dataclasses.replace(config, **changes), algorithm))
    check_named(config.algorithm, algorithm is not None)
    return config


@contextmanager
def prepared_run(
    config: TrainConfig,
    resume: bool,
    inputs: Inputs | None,
    accept: bool,
    algorithm: Given | None,
    source: MakeSource | None,
    curriculum: OfRows | None,
) -> Iterator[Running]:
    """Context manager of a run that is set up and, where it is resumed, restored; see `loop.train` for all arguments.

    The run's folder is locked and closed in the end, and hosts leave together. Nothing is written before all is
    checked.
    """
    if source is not None and curriculum is not None:
        raise InputError("a source chooses its prompts itself: give either a source or a curriculum, not both")
    with ExitStack() as stack:
        inputs = stack.enter_context(read_inputs(config, resume=resume)) if inputs is None else inputs
        if config.epochs_of_data:
            steps = math.ceil(config.epochs_of_data * len(inputs.prompts.training) / config.prompts_per_step)
            config = dataclasses.replace(config, steps=max(steps, 1))
        limit_heap()
        use_compile_cache()
        count_compiles()
        clock = Clock()
        activity = Activity(clock)
        interrupted, terminated = stack.enter_context(interruptible()), stack.enter_context(preemptible())
        stack.enter_context(watched(config, clock))
        with explained(config, clock, dict), clock("load"):
            config, of_dtype = with_dtype(config, resume)
            given = config
            date = all_hosts().gather(today())[0]  # the day of the first host, unless the run has one
            before = RunFolder(config.output).recorded_date() if resume and not config.date else ""
            config = dataclasses.replace(config, date=config.date or before or date)
            config, chosen = with_mesh(config, resume, algorithm)
            parts, train_state, memory = set_up(config, inputs, algorithm, own_source=source is not None)
            parts = with_kept_reference(config, parts, train_state.params)
            notes = (*inputs.prompts.notes, *(reward.note for reward in inputs.rewards), of_dtype, chosen)
            parts = parts._replace(notes=tuple(filter(None, notes)))
            if source is None:
                curriculum = with_embeddings(config, parts, train_state.params, curriculum)
                batches = of_source(source_of(config, parts, clock, curriculum, activity.watch), parts)
            else:
                batches = timed(source(parts), clock)
                check_provided(config, parts.algorithm, batches.provides)
            stack.callback(batches.beside.close)
            state = RunState(train_state, memory, batches.init(), parts.policies)
            parts = parts._replace(policies={})  # the state has them, and an update donates them
        started()
        hosts = parts.hosts
        if hosts.any(terminated()):  # also the hosts that were not told
            raise Preempted
        stop_if(hosts.any(interrupted()))
        folder = RunFolder(config.output) if hosts.first else UnwrittenFolder(config.output)
        if not resume and hosts.first:
            folder.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder.path))
            folder.create(to_dict(given), config.mesh, parts.record, config.date)
        stack.enter_context(preemptible(leave=hosts.count == 1))
        try:
            with closing(folder):
                loop = LoopState()
                provenance = {"settings": settings_to_compare(config, os.getcwd()), "inputs": parts.digests}
                checkpoints = Checkpoints(folder.checkpoints_for(hosts.count), config.keep_checkpoints)
                if resume:
                    with explained(config, clock, dict), clock("load"):
                        state, loop = restore(state, batches, config, parts, checkpoints, folder, clock, accept)
                folder.begin(config, loop.step)
                # The evaluation before training is after 0 steps; it is repeated if its result was lost.
                folder.rewind(loop.step if loop.step or "eval_before" in loop.summary else -1)
                yield Running(
                    config, parts, batches, folder, checkpoints, clock, activity, interrupted, terminated, state, loop,
                    provenance, resume,
                )  # fmt: skip
            hosts.gather("done")  # a host that left earlier would count as dead
        except Preempted:
            hosts.gather("saved")
            raise
