"""The host loop: sample, score, prepare, update, in plain lines over the same functions that a script would use."""

import logging
from collections.abc import Sequence
from typing import Any

from jaxrl_llm.training.begin import Given, Inputs, MakeSource, OfRows, of_values, prepared_run
from jaxrl_llm.training.config import TrainConfig, inside
from jaxrl_llm.training.folder.files import RunFolder
from jaxrl_llm.training.folder.report import write_report
from jaxrl_llm.training.journal import opened, say_opening, write_step, write_summary
from jaxrl_llm.training.running import Running, evaluate_and_log, next_batch, saved_on_preemption, steps
from jaxrl_llm.training.step import learn_from, measured, without_spike
from jaxrl_llm.utils.keywords import checked_keywords

logger = logging.getLogger("jaxrl_llm.training")


@checked_keywords(
    lambda name: f"train(TrainConfig({name}=...))" if name in TrainConfig.__dataclass_fields__ else inside(name),
    {"args": "config, a TrainConfig", "train_dataset": "TrainConfig(prompts=...)"},
)
def train(
    config: TrainConfig,
    *,
    resume: bool = False,
    inputs: Inputs | None = None,
    accept_changed_inputs: bool = False,
    algorithm: Given | None = None,
    source: MakeSource | None = None,
    curriculum: OfRows | None = None,
    rewards: Sequence[Any] | Any = None,
    environment: Any = None,
    tools: Sequence[Any] | Any = None,
    harness: Any = None,
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
    epochs; not together with a source. rewards, environment, tools, harness: replace the configured ones, by names or
    as Python values: functions, `Reward`s and classes, which a configuration takes too. Reward functions run in
    processes where they can be sent there, else in threads, as a line says. They are recorded as `python:NAME`; to
    resume, the same must be given again, and are compared.

    Raises InputError for bad input, before anything is written; if another process is using the run; and on resume if
    no checkpoint is usable or the inputs have changed. Raises NotFiniteError if a loss, gradient or new parameter is
    not finite (the last good checkpoint is kept), OutOfMemoryError if a device's memory is too small, KeyboardInterrupt
    after Ctrl-C, and its subclass Preempted after SIGTERM: the step at hand is left (with several processes it is
    finished), and what was done before it is saved.
    """
    values = {"rewards": rewards, "environment": environment, "tools": tools, "harness": harness}
    config = of_values(config, algorithm, values)
    with prepared_run(config, resume, inputs, accept_changed_inputs, algorithm, source, curriculum) as run:
        _run(run)
        run.stop_if_told()  # a report takes seconds; the resumed run writes it
        try:
            if run.parts.hosts.first:
                write_report(run.folder.path)
        except Exception as error:  # whatever it is: the run itself is complete and saved
            logger.warning("no report was written: %s: jaxrl report %s tries again", error, config.output)
            logger.debug("why no report was written", exc_info=True)
    return run.loop.summary


def _run(run: Running) -> None:
    """The steps of a run, from its first or from its checkpoint, between two evaluations."""
    with opened(run) as journal, saved_on_preemption(run, journal):
        say_opening(run, journal)
        evaluate_and_log(run, journal, "eval_before", "before training")
        for step in steps(run, journal):
            found = next_batch(run, step)
            learned = learn_from(run, found, step)
            metrics = measured(run, found, learned)
            write_step(run, journal, step, found, learned, metrics, without_spike(run))
        evaluate_and_log(run, journal, "eval_after", "after training")
        write_summary(run, journal)


def resume(
    path: str, accept_changed_inputs: bool = False, algorithm: Given | None = None, **values: Any
) -> dict[str, Any]:
    """Resume a run's folder as if it had never stopped. values: rewards, environment, tools, harness; see `train`."""
    config = RunFolder(path).read_config()
    return train(config, resume=True, accept_changed_inputs=accept_changed_inputs, algorithm=algorithm, **values)
