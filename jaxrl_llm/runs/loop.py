"""The host loop: sample, score, prepare, update. Plain lines over the same parts that a script would use."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import jax

from jaxrl_llm import heap
from jaxrl_llm.algorithms import Algorithm
from jaxrl_llm.compilation import count_compiles, use_compile_cache
from jaxrl_llm.errors import InputError
from jaxrl_llm.interrupts import interruptible, stop_if
from jaxrl_llm.models.lora import join
from jaxrl_llm.reporting import Progress, write_report
from jaxrl_llm.rollouts.sources import Source
from jaxrl_llm.runs.checkpoints import Checkpoints
from jaxrl_llm.runs.config import TrainConfig, to_dict
from jaxrl_llm.runs.evaluate import evaluate_run
from jaxrl_llm.runs.inputs import Inputs, read_inputs
from jaxrl_llm.runs.learn import learn
from jaxrl_llm.runs.lock import locked
from jaxrl_llm.runs.record import about, as_scored, describe, known, metrics_of, outcome, tally, writers
from jaxrl_llm.runs.run_folder import Clock, RunFolder
from jaxrl_llm.runs.setup import Parts, set_up
from jaxrl_llm.runs.source import MakeCurriculum, source_of
from jaxrl_llm.runs.state import Course, RunState, record_of, restore, save

logger = logging.getLogger("jaxrl_llm.runs")


def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    inputs: Inputs | None = None,
    accept_changed_inputs: bool = False,
    algorithm: Algorithm | None = None,
    source: Callable[[Parts], Source] | None = None,
    curriculum: MakeCurriculum | None = None,
) -> dict[str, Any]:
    """Run (or go on with) a training run and return its summary, which is also in summary.json.

    All state is in the parameters, the optimiser, the transforms, the position in the prompts and the pool of begun
    completions; each is in every checkpoint, and the randomness of a step comes from (seed, step). So a run that was
    killed and resumed gives the same parameters and metrics, bit by bit, as one that was not.

    inputs: prompts and rewards, where they have been read already (`read_inputs`, within its context).
    accept_changed_inputs: resume although settings, prompts, rewards or the model are not what they were.
    algorithm: in place of the configured one. source: makes what gives the batches, in place of prompts, rollouts and
    rewards (see `rollouts.sources`). curriculum: makes, of the training rows, what chooses the prompts of each step, in
    place of shuffled epochs; not with a source, which has its own.

    Raises InputError for bad input, before anything is made; where the run is in use by another process; and on resume
    where there are checkpoints of which none can be used, or they are of other inputs. NotFiniteError where a loss, a
    gradient or a new parameter is not finite (the last good checkpoint stands). KeyboardInterrupt after Ctrl-C.
    """
    if source is not None and curriculum is not None:
        raise InputError("both a source and a curriculum are given, but a source chooses its prompts itself: give one")
    if inputs is None:
        with read_inputs(config, resume=resume) as inputs:
            return train(
                config, resume=resume, inputs=inputs, accept_changed_inputs=accept_changed_inputs, algorithm=algorithm,
                source=source, curriculum=curriculum,
            )  # fmt: skip
    heap.keep_little()
    use_compile_cache()
    count_compiles()
    clock = Clock()
    with ExitStack() as stack:
        interrupted = stack.enter_context(interruptible())
        with clock("load"):
            parts, train_state, memory = set_up(config, inputs, algorithm)
            batches = source_of(config, parts, clock, curriculum) if source is None else source(parts)
            state = RunState(train_state, memory, batches.init())
        stop_if(interrupted())
        folder = RunFolder(config.output)
        if not resume:
            folder.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder.path))
            folder.create(to_dict(config))
        summary = _run(config, parts, state, batches, folder, clock, interrupted, resume, accept_changed_inputs)
        try:
            write_report(folder.path)
        except (InputError, OSError) as error:  # e.g. no matplotlib; the run itself is done and saved
            logger.warning("there is no report: %s", error)
        return summary


def _run(
    config: TrainConfig,
    parts: Parts,
    state: RunState,
    source: Source,
    folder: RunFolder,
    clock: Clock,
    interrupted: Callable[[], bool],
    resumed: bool,
    accept_changed_inputs: bool,
) -> dict[str, Any]:
    """`train`, once all is set up."""
    checkpoints, record = Checkpoints(folder.checkpoints, config.keep_checkpoints), record_of(config, parts)
    course = Course()
    if resumed:
        state, course = restore(state, source, config, parts, checkpoints, folder, clock, accept_changed_inputs)
    first, summary = course.step, course.summary
    # Completions of the evaluation before training count as of step -1; they come again if its result was lost.
    folder.rewind(first if first or "eval_before" in summary else -1)

    def test(name: str, step: int, title: str) -> None:
        if parts.held_out is None:
            return
        if name != "eval_before" or name not in summary:
            with clock("evaluate"):
                result = evaluate_run(config, parts, join(parts.frozen, state.train.params))
            summary[name] = result.figures
            folder.log_completions(step, name, parts.tokenizer, result.scored, parts.held_out.rows, groups=8)
            folder.write(folder.summary, summary)
            stop_if(interrupted())
        progress.say(f"{title}: {describe(summary[name])}")

    with ExitStack() as stack:
        writer = stack.enter_context(closing(writers(config, folder, first)))
        stack.callback(checkpoints.close)
        progress = stack.enter_context(Progress(config.steps, first))
        for text in [*about(config, parts, first, resumed), *course.remarks]:
            progress.say(text)
        if first and parts.held_out is not None and "eval_before" not in summary:
            progress.say("no evaluation from before training is left; eval_before is of the resumed parameters")
        test("eval_before", -1, "before training")
        key = jax.random.key(config.seed)
        for step in range(first, config.steps):
            before, taken = dict(clock.seconds), int(state.train.step)
            params = join(parts.frozen, state.train.params)
            found, at = source.next(state.source, params, jax.random.fold_in(key, step), step)
            stop_if(interrupted())
            heap.give_back()
            with clock("update"):
                state = state._replace(source=at)
                learned = learn(parts, config, state, params, found.scored.batch, step, course.feedback)
            state = learned.state
            metrics = metrics_of(config, parts, found, learned, before, clock.seconds, taken)
            stop_if(interrupted())
            course.feedback = {**learned.metrics, "updates": course.feedback.get("updates", 0.0) + 1}
            course.counts, remarks = tally(course.counts, step, metrics, config)
            for text in remarks:
                progress.say(text)
            metrics = known(found, metrics)
            writer.write(step, metrics)
            if config.log_completions_every and (step % config.log_completions_every == 0 or step == config.steps - 1):
                folder.log_completions(step, "train", parts.tokenizer, as_scored(found, learned), found.rows)
            progress.update(step, metrics)
            course.step = step + 1
            if config.eval_every and course.step % config.eval_every == 0 and course.step < config.steps:
                test("eval_latest", step, f"after step {course.step}")
            if course.step == config.steps or (config.checkpoint_every and course.step % config.checkpoint_every == 0):
                with clock("checkpoint"):
                    writer.flush()  # what is logged of these steps must not be lost once they are not taken again
                    save(state, course, source, checkpoints, folder, clock, record)
                stop_if(interrupted())
        test("eval_after", config.steps, "after training")
        with clock("checkpoint"):
            checkpoints.wait()
        summary |= outcome(config, parts.prompts, course.counts, clock.seconds)
        folder.write(folder.summary, summary)
        for text in summary["warnings"]:
            progress.say(f"warning: {text}")
    return summary


def resume(path: str, accept_changed_inputs: bool = False) -> dict[str, Any]:
    """Go on with the run in a folder, as if it had never stopped; see `train`."""
    return train(RunFolder(path).read_config(), resume=True, accept_changed_inputs=accept_changed_inputs)
