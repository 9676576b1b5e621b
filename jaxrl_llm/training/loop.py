"""The host loop: sample, score, prepare, update, in plain lines over the same functions that a script would use."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from typing import Any

import jax

from jaxrl_llm.algorithms import Given
from jaxrl_llm.core.part_checks import expect
from jaxrl_llm.core.source import Source
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.plan.choose_mesh import with_mesh
from jaxrl_llm.reporting import Progress, read_jsonl
from jaxrl_llm.rewards.environment import ENVIRONMENT
from jaxrl_llm.training.activity import Activity
from jaxrl_llm.training.config import TrainConfig, inside
from jaxrl_llm.training.config_json import to_dict
from jaxrl_llm.training.evaluate import evaluate_run
from jaxrl_llm.training.folder.checkpoints import Checkpoints
from jaxrl_llm.training.folder.files import RunFolder, UnwrittenFolder
from jaxrl_llm.training.folder.lock import locked
from jaxrl_llm.training.folder.report import write_report
from jaxrl_llm.training.folder.started_on import with_date
from jaxrl_llm.training.health.goodput import Clock, lap_metrics
from jaxrl_llm.training.health.oom import arrays_of, explained
from jaxrl_llm.training.health.profiling import profiled
from jaxrl_llm.training.health.rollback import Judged, undo_spike
from jaxrl_llm.training.health.watchdog import watched
from jaxrl_llm.training.hyperparameters import check_named
from jaxrl_llm.training.inputs import Inputs, read_inputs
from jaxrl_llm.training.method import check_provided, named
from jaxrl_llm.training.method_settings import fitted
from jaxrl_llm.training.metrics import (
    accuracy_line,
    closing_summary,
    count_step,
    metric_writers,
    opening_notes,
    scored_rows,
    step_metrics,
    trend_warnings,
    without_nan,
)
from jaxrl_llm.training.reference import with_second_policy
from jaxrl_llm.training.setup import RunParts, set_up
from jaxrl_llm.training.source import OfRows, source_of, timed
from jaxrl_llm.training.state import LoopState, RunState, provenance_of, restore, save, saved_when_preempted
from jaxrl_llm.training.step import learn, scalars
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.keywords import checked_keywords
from jaxrl_llm.utils.process import (
    Preempted,
    count_compiles,
    interruptible,
    limit_heap,
    preemptible,
    stop_if,
    trim_heap,
    use_compile_cache,
)
from jaxrl_llm.utils.starting import started

logger = logging.getLogger("jaxrl_llm.training")

EVALUATED_SHOWN = 1024  # held-out prompts whose completions before and after training are logged


def _of_config(name: str) -> str:
    """Where a name belongs that is no argument of `train`: to the configuration."""
    return f"train(TrainConfig({name}=...))" if name in TrainConfig.__dataclass_fields__ else inside(name)


@checked_keywords(_of_config, {"args": "config, a TrainConfig", "train_dataset": "TrainConfig(prompts=...)"})
def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    inputs: Inputs | None = None,
    accept_changed_inputs: bool = False,
    algorithm: Given | None = None,
    source: Callable[[RunParts], Source] | None = None,
    curriculum: OfRows | None = None,
    rewards: Sequence[Any] | Any = None,
    environment: Any = None,
    tools: Sequence[Any] | Any = None,
) -> dict[str, Any]:
    """Start or resume a training run, and return its summary, which is also written to summary.json.

    The state is the parameters, the optimiser, the transforms' memory and the source (position in the prompts,
    completions in flight). All of it is in every checkpoint, and a step's randomness depends on (seed, step) only, so
    a run that is killed and resumed has bit-identical parameters and metrics.

    inputs: prompts and rewards that are already read (by `read_inputs`, within its context). accept_changed_inputs:
    resume even if settings, prompts, rewards or the model have changed. algorithm: replaces the configured one: an
    Algorithm, a function that makes one of the configuration's hyper-parameters, or a name. The first two are recorded
    in config.json as `python:NAME`; to resume, the same must be given again, and is compared; evaluation, sampling and
    export do not need it. source: makes the `Source` of batches, which replaces prompts, rollouts and rewards (see
    `rollouts.runtime.sources`). curriculum: makes the `Curriculum` from the training rows, which replaces shuffled
    epochs; not together with a source. rewards, environment, tools: replace the configured ones, by names or as Python
    values: functions, `Reward`s and classes, which a configuration takes too. Reward functions run in processes where
    they can be sent there, else in threads, as a line says. They are recorded as `python:NAME`; to resume, the same
    must be given again, and are compared.

    Raises InputError for bad input, before anything is written; if another process is using the run; and on resume if
    no checkpoint is usable or the inputs have changed. Raises NotFiniteError if a loss, gradient or new parameter is
    not finite (the last good checkpoint is kept), OutOfMemoryError if a device's memory is too small, KeyboardInterrupt
    after Ctrl-C, and its subclass Preempted after SIGTERM: the step at hand is left (with several processes it is
    finished), and what was done before it is saved.
    """
    if source is not None and curriculum is not None:
        raise InputError("a source chooses its prompts itself: give either a source or a curriculum, not both")
    expect("config", config, TrainConfig)
    changes = {"rewards": rewards, "environment": environment, "tools": tools}
    changes = {name: value for name, value in changes.items() if value is not None}
    if "rewards" in changes and config.eval_reward == ENVIRONMENT:
        changes["eval_reward"] = None  # it may be no longer among them
    config = dataclasses.replace(config, **changes)
    config = fitted(named(config, algorithm))
    check_named(config.algorithm, algorithm is not None)
    if inputs is None:
        with read_inputs(config, resume=resume) as inputs:
            return train(
                config, resume=resume, inputs=inputs, accept_changed_inputs=accept_changed_inputs, algorithm=algorithm,
                source=source, curriculum=curriculum,
            )  # fmt: skip
    limit_heap()
    use_compile_cache()
    count_compiles()
    clock = Clock()
    activity = Activity(clock)
    with ExitStack() as stack:
        interrupted, terminated = stack.enter_context(interruptible()), stack.enter_context(preemptible())
        stack.enter_context(watched(config, clock))
        with explained(config, clock, dict), clock("load"):
            given, (config, chosen) = config, with_mesh(with_date(config, resume), resume, algorithm)
            parts, train_state, memory = set_up(config, inputs, algorithm, own_source=source is not None)
            of_rewards = [reward.note for reward in inputs.rewards if reward.note]
            parts = parts._replace(notes=(*inputs.prompts.notes, *of_rewards, *((chosen,) if chosen else ())))
            if source is None:
                batches = source_of(config, parts, clock, curriculum, activity.watch)
            else:
                batches = timed(source(parts), clock)
                check_provided(config, parts.algorithm, batches.provides)
            state = RunState(
                train_state, memory, batches.init(), reference=parts.moving, previous=parts.previous,
                other=parts.other, target=parts.target,
            )  # fmt: skip
            # The state has them, and an update donates them.
            parts = parts._replace(moving=None, previous=None, other=None, target=None)
        started()
        if parts.hosts.any(terminated()):  # also the hosts that were not told
            raise Preempted
        stop_if(parts.hosts.any(interrupted()))
        folder = RunFolder(config.output) if parts.hosts.first else UnwrittenFolder(config.output)
        if not resume and parts.hosts.first:
            folder.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder.path))
            folder.create(to_dict(given), config.mesh, parts.record, config.date)
        stack.enter_context(preemptible(leave=parts.hosts.count == 1))
        try:
            with closing(folder):
                summary = _run(
                    config, parts, state, batches, folder, clock, activity, interrupted, terminated, resume,
                    accept_changed_inputs,
                )  # fmt: skip
                stop_if(parts.hosts.any(interrupted()))  # a report takes seconds; the resumed run writes it
                try:
                    if parts.hosts.first:
                        write_report(folder.path)
                except Exception as error:  # whatever it is: the run itself is complete and saved
                    logger.warning("no report was written: %s: jaxrl report %s tries again", error, config.output)
                    logger.debug("why no report was written", exc_info=True)
            parts.hosts.gather("done")  # a host that left earlier would count as dead
        except Preempted:
            parts.hosts.gather("saved")
            raise
        return summary


def _run(
    config: TrainConfig,
    parts: RunParts,
    state: RunState,
    source: Source,
    folder: RunFolder,
    clock: Clock,
    activity: Activity,
    interrupted: Callable[[], bool],
    terminated: Callable[[], bool],
    resumed: bool,
    accept_changed_inputs: bool,
) -> dict[str, Any]:
    """The body of `train`, after set-up."""
    loop, hosts, provenance = LoopState(), parts.hosts, provenance_of(config, parts)
    checkpoints = Checkpoints(folder.checkpoints_for(hosts.count), config.keep_checkpoints)
    if resumed:
        with explained(config, clock, dict), clock("load"):
            state, loop = restore(state, source, config, parts, checkpoints, folder, clock, accept_changed_inputs)
    folder.begin(config, loop.step)
    first, summary = loop.step, loop.summary
    # The evaluation before training is after 0 steps; it is repeated if its result was lost.
    folder.rewind(first if first or "eval_before" in summary else -1)
    judge = config.eval_reward or next((reward.name for reward in parts.rewards), None)

    def evaluate(name: str, step: int, title: str) -> None:
        if parts.held_out is None:
            return
        if name != "eval_before" or name not in summary:
            with clock("evaluate"):
                params = combine(parts.frozen, state.train.params)
                result = evaluate_run(config, parts, params, activity.watch, step)
            summary[name] = result.figures
            some = 8 if name == "eval_latest" else EVALUATED_SHOWN
            folder.log_completions(step, name, parts.tokenizer, result.scored, parts.held_out.rows, some, judge)
            folder.write(folder.summary, summary)
            stop_if(hosts.any(interrupted()))
        progress.say(f"{title}: {accuracy_line(summary[name])}")

    def save_now() -> None:
        with clock("checkpoint"):
            folder.write_left_out(loop.step, source.left_out(state.source))
            source.keep(state.source, loop.step)
            writer.flush()  # a resumed run does not repeat these steps, so their metrics must be on disk
            save(state, loop, source, checkpoints, folder, clock, provenance)

    with ExitStack() as stack:
        stack.enter_context(explained(config, clock, lambda: arrays_of(parts, state)))
        try:
            writer = stack.enter_context(closing(metric_writers(config, folder, first, hosts)))
        except InputError:  # e.g. wandb without a login: nothing of the run is kept, so that a retry may begin it
            if not resumed:
                folder.abandon()
            raise
        stack.callback(checkpoints.close)
        screen = None if hosts.first else stack.enter_context(open(os.devnull, "w"))
        progress = stack.enter_context(Progress(config.steps, first, stream=screen, doing=activity.text))
        stack.enter_context(saved_when_preempted(loop, checkpoints, save_now))
        profile = stack.enter_context(profiled(folder.path, progress.say))
        for text in [*opening_notes(config, parts, first, resumed), *loop.notes]:
            progress.say(text)
        if first and parts.held_out is not None and "eval_before" not in summary:
            progress.say("the evaluation from before training is lost; eval_before is of the resumed parameters")
        evaluate("eval_before", 0, "before training")
        key = jax.random.key(config.seed)
        for step in range(first, config.steps):
            clock.step = step
            profile(step)
            before, taken = clock.seconds, int(state.train.step)
            params = combine(with_second_policy(state.other, parts.frozen), state.train.params)
            found, at = source.next(state.source, params, jax.random.fold_in(key, step), step)
            stop_if(hosts.any(interrupted()))
            trim_heap()
            with clock("update"):
                state = state._replace(source=at)
                state, learned = learn(parts, config, state, found.scored.batch, step, loop.feedback)
            if controls := scalars(learned.batch.controls):
                state = state._replace(source=source.told(state.source, controls))
            state = state._replace(source=source.learned(state.source, learned.batch))
            metrics = step_metrics(config, parts, found, learned, before, clock.seconds, taken)
            stop_if(hosts.any(interrupted()) and not terminated())  # after SIGTERM the step is finished from here on
            loop.feedback = {**learned.metrics, "updates": loop.feedback.get("updates", 0.0) + 1}
            judged = Judged(state)
            if config.spike_factor:
                judged = undo_spike(config, parts, state, loop, checkpoints, clock)
            state, rolled_back, undone = judged
            loop.counts, notes = count_step(loop.counts, step, metrics, config)
            for text in [*notes, *undone]:
                progress.say(text)
            metrics = {**without_nan(found, metrics), **rolled_back, **lap_metrics(clock, loop.undone)}
            writer.write(step + 1, metrics)  # files count the steps that are done, as the console does
            folder.log_groups(step + 1, found, judge)
            if config.log_completions_every and (step % config.log_completions_every == 0 or step == config.steps - 1):
                rows = scored_rows(found, learned)
                folder.log_completions(step + 1, "train", parts.tokenizer, rows, found.rows, judge=judge)
            progress.update(step, metrics)
            loop.step = step + 1
            if config.eval_every and loop.step % config.eval_every == 0 and loop.step < config.steps:
                evaluate("eval_latest", loop.step, f"after step {loop.step}")
            if loop.step == config.steps or (config.checkpoint_every and loop.step % config.checkpoint_every == 0):
                save_now()
                stop_if(hosts.any(interrupted()))
            if hosts.any(terminated()):
                raise Preempted
        evaluate("eval_after", config.steps, "after training")
        with clock("checkpoint"):
            checkpoints.wait()
        summary |= closing_summary(config, parts.prompts, loop.counts, clock.seconds, loop.undone)
        summary["warnings"] += trend_warnings(read_jsonl(folder.metrics)) if hosts.first else []
        folder.write(folder.summary, summary)
        for text in summary["warnings"]:
            progress.say(f"warning: {text}")
    return summary


def resume(
    path: str, accept_changed_inputs: bool = False, algorithm: Given | None = None, **values: Any
) -> dict[str, Any]:
    """Resume the run in a folder as if it had never stopped. values: rewards, environment, tools; see `train`."""
    config = RunFolder(path).read_config()
    return train(config, resume=True, accept_changed_inputs=accept_changed_inputs, algorithm=algorithm, **values)
