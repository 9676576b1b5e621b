"""What a run says and writes down: the screen, metrics, groups and completions."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_llm.core.source import Step
from jaxrl_llm.distributed.hosts import ALONE, Hosts
from jaxrl_llm.reporting import Progress, read_jsonl
from jaxrl_llm.reporting.logging.services import SERVICES, ServiceWriter
from jaxrl_llm.reporting.logging.writers import JsonlWriter, MetricWriter, TensorBoardWriter, all_of
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.config.json_text import to_dict
from jaxrl_llm.training.folder.files import RunFolder
from jaxrl_llm.training.health.goodput import lap_metrics
from jaxrl_llm.training.health.profiling import profiled
from jaxrl_llm.training.metrics import Learned, count_step, without_nan, without_padding
from jaxrl_llm.training.notes import closing_summary, opening_notes, trend_warnings
from jaxrl_llm.utils.errors import InputError

if TYPE_CHECKING:
    from jaxrl_llm.training.running import Running
    from jaxrl_llm.training.step import StepOutcome


class Journal(NamedTuple):
    """Where a run writes, and says, what it does."""

    writer: Any
    progress: Progress
    profile: Callable[[int], None]
    judge: str | None
    """The reward by which completions are right or wrong."""

    def say(self, text: str) -> None:
        """Print a line above the line of progress."""
        self.progress.say(text)


@contextmanager
def opened(run: Running) -> Iterator[Journal]:
    """The journal of a run, which begins with what there is to say of it."""
    config, parts, folder, first = run.config, run.parts, run.folder, run.loop.step
    with ExitStack() as stack:
        try:
            writer = stack.enter_context(closing(metric_writers(config, folder, first, parts.hosts)))
        except InputError:  # e.g. wandb without a login: nothing of the run is kept, so that a retry may begin it
            if not run.resumed:
                folder.abandon()
            raise
        stack.callback(run.checkpoints.close)
        screen = None if parts.hosts.first else stack.enter_context(open(os.devnull, "w"))
        progress = stack.enter_context(Progress(config.steps, first, stream=screen, doing=run.activity.text))
        judge = config.eval_reward or next((reward.name for reward in parts.rewards), None)
        yield Journal(writer, progress, stack.enter_context(profiled(folder.path, progress.say)), judge)


def say_opening(run: Running, journal: Journal) -> None:
    """Print what there is to know of a run that starts or goes on."""
    for text in [*opening_notes(run.config, run.parts, run.loop.step, run.resumed), *run.loop.notes]:
        journal.say(text)
    if run.loop.step and run.parts.held_out is not None and "eval_before" not in run.loop.summary:
        journal.say("the evaluation from before training is lost; eval_before is of the resumed parameters")


def write_step(
    run: Running,
    journal: Journal,
    step: int,
    found: Step,
    learned: Learned,
    metrics: dict[str, float],
    judged: StepOutcome,
) -> None:
    """Write down a step: its counts and notes, metrics, groups, and completions when it is time for them."""
    config, folder, loop = run.config, run.folder, run.loop
    loop.counts, notes = count_step(loop.counts, step, metrics, config)
    for text in [*notes, *judged.notes]:
        journal.say(text)
    metrics = {**without_nan(found, metrics), **judged.metrics, **lap_metrics(run.clock, loop.undone)}
    journal.writer.write(step + 1, metrics)  # files count the steps that are done, as the console does
    folder.log_groups(step + 1, found, journal.judge)
    if config.log_completions_every and (step % config.log_completions_every == 0 or step == config.steps - 1):
        rows, tokenizer = without_padding(found, learned), run.parts.tokenizer
        folder.log_completions(step + 1, "train", tokenizer, rows, found.rows, judge=journal.judge)
    journal.progress.update(step, metrics)


def write_summary(run: Running, journal: Journal) -> None:
    """Write the summary of a run that has ended, and print its warnings."""
    loop, folder, clock = run.loop, run.folder, run.clock
    with clock("checkpoint"):
        run.checkpoints.wait()
    loop.summary |= closing_summary(run.config, loop.step, run.parts.prompts, loop.counts, clock.seconds, loop.undone)
    loop.summary["warnings"] += trend_warnings(read_jsonl(folder.metrics)) if run.parts.hosts.first else []
    folder.write(folder.summary, loop.summary)
    for text in loop.summary["warnings"]:
        journal.say(f"warning: {text}")


def metric_writers(config: TrainConfig, folder: RunFolder, step: int, hosts: Hosts = ALONE) -> MetricWriter:
    """The writer of metrics.jsonl and of the configured TensorBoard logs and services, after `step` steps.

    Only the first host writes.
    """
    if not hosts.first:
        return all_of()
    out: list[MetricWriter] = [JsonlWriter(folder.metrics)]
    if config.tensorboard:
        out.append(TensorBoardWriter(folder.path / "tensorboard", purge_step=step + 1))
    for service in SERVICES:
        if project := getattr(config, service.package):
            out.append(ServiceWriter(service, project, Path(config.output).name, to_dict(config), folder.path))
    return all_of(*out)
