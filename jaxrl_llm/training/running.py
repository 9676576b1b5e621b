"""A run under way, and what happens to it between steps: evaluation, checkpoints, and the end that it is told."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from jaxrl_llm.core.source import Source, Step
from jaxrl_llm.models.parameters import combine
from jaxrl_llm.models.policy import Params
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.evaluation.evaluate import evaluate_run
from jaxrl_llm.training.folder.checkpoints import Checkpoints
from jaxrl_llm.training.folder.files import RunFolder
from jaxrl_llm.training.health.goodput import Activity, Clock
from jaxrl_llm.training.health.oom import arrays_of, explained
from jaxrl_llm.training.journal import Journal
from jaxrl_llm.training.notes import accuracy_line
from jaxrl_llm.training.other_policies.reference import drawn_from, with_second_policy
from jaxrl_llm.training.setup import RunParts
from jaxrl_llm.training.state import LoopState, RunState, save, saved_when_preempted
from jaxrl_llm.utils.errors import require_choice
from jaxrl_llm.utils.process import Preempted, stop_if, trim_heap

BEST = "eval_best"  # entry of the summary: figures of the best evaluation, and after how many steps
EVALUATED_SHOWN = 1024  # held-out prompts whose completions before and after training are logged


@dataclass
class Running:
    """A run under way: what stays, where it writes, and its state, which each step replaces."""

    config: TrainConfig
    parts: RunParts
    source: Source
    folder: RunFolder
    checkpoints: Checkpoints
    clock: Clock
    activity: Activity
    interrupted: Callable[[], bool]
    """Whether Ctrl-C was heard in this process."""
    terminated: Callable[[], bool]
    """Whether SIGTERM was heard in this process."""
    state: RunState
    loop: LoopState
    provenance: dict[str, Any]
    """Settings and digests of the inputs, for its checkpoints."""
    resumed: bool
    lap: float = 0.0
    """Seconds of the run when the step at hand began."""
    taken: int = 0
    """Gradient steps before it."""

    def params(self) -> Params:
        """The parameters that tokens are sampled with: of the policy that learns, and of others that move."""
        policies = self.state.policies
        params = combine(with_second_policy(policies.get("other"), self.parts.frozen), self.state.train.params)
        return params | drawn_from(self.config, self.parts.algorithm, policies)

    def stop_if_told(self, finish: bool = False) -> None:
        """End the run if any host was told to. finish: not after SIGTERM, which lets the step at hand finish."""
        stop_if(self.parts.hosts.any(self.interrupted()) and not (finish and self.terminated()))


@contextmanager
def saved_on_preemption(run: Running, journal: Journal) -> Iterator[None]:
    """Save the steps that are done when the run is preempted, and explain a device's memory that runs out."""
    with (
        explained(run.config, run.clock, lambda: arrays_of(run.parts, run.state)),
        saved_when_preempted(run.loop, run.checkpoints, partial(save_now, run, journal)),
    ):
        yield


def next_batch(run: Running, step: int) -> Step:
    """The batch of a step, whose source goes on from there. Randomness depends on (seed, step) only."""
    run.lap = sum(run.clock.seconds.values())
    run.taken = int(run.state.train.step)
    key = jax.random.fold_in(jax.random.key(run.config.seed), step)
    found, at = run.source.next(run.state.source, run.params(), key, step)
    run.stop_if_told()  # the state that is saved then is that before the step
    run.state = run.state._replace(source=at)
    trim_heap()
    return found


def steps(run: Running, journal: Journal) -> Iterator[int]:
    """The steps that are left. Between them the run is evaluated and saved, and ends if it was told to, or no longer
    gets better.

    Raises KeyboardInterrupt after Ctrl-C, and Preempted after SIGTERM.
    """
    config, loop = run.config, run.loop
    for step in range(loop.step, config.steps):
        if stalled(config, loop.summary, loop.step):
            best = loop.summary[BEST]["step"]
            journal.say(f"the run ends after {loop.step} steps: the best evaluation was after {best}")
            break
        run.clock.step = step
        journal.profile(step)
        yield step
        loop.step = step + 1
        if config.eval_every and loop.step % config.eval_every == 0 and loop.step < config.steps:
            evaluate_and_log(run, journal, "eval_latest", f"after step {loop.step}")
        last = loop.step == config.steps or stalled(config, loop.summary, loop.step)
        if last or (config.checkpoint_every and loop.step % config.checkpoint_every == 0):
            save_now(run, journal)
            run.stop_if_told()
        if run.parts.hosts.any(run.terminated()):
            raise Preempted


def evaluate_and_log(run: Running, journal: Journal, name: str, title: str) -> None:
    """Sample the held-out prompts and say, log and summarise the figures, as `name`; nothing without such prompts.

    The evaluation before training is of the run as it begins: a resumed run has it already, unless its result was lost.
    """
    parts, summary, folder, step = run.parts, run.loop.summary, run.folder, run.loop.step
    if parts.held_out is None:
        return
    if name != "eval_before" or name not in summary:
        step = 0 if name == "eval_before" else step
        with run.clock("evaluate"), run.source.beside.paused():
            params = combine(parts.frozen, run.state.train.params)
            result = evaluate_run(run.config, parts, params, run.activity.watch, step)
        summary[name] = result.figures
        if BEST not in summary or is_better(result.figures, summary[BEST], run.config.eval_metric):
            summary[BEST] = {**result.figures, "step": step}
        some = 8 if name == "eval_latest" else EVALUATED_SHOWN
        folder.log_completions(step, name, parts.tokenizer, result.scored, parts.held_out.rows, some, journal.judge)
        folder.write(folder.summary, summary)
        run.stop_if_told()
    journal.say(f"{title}: {accuracy_line(summary[name])}")


def is_better(figures: Mapping[str, Any], best: Mapping[str, Any], metric: str) -> bool:
    """Whether an evaluation is better than the best until then; metric: see `TrainConfig.eval_metric`.

    InputError, with the figures there are, for another metric.
    """
    name = metric or ("loss" if "loss" in figures else "accuracy")
    require_choice("figure of an evaluation (eval_metric)", name, figures)
    return bool(figures[name] < best[name] if name == "loss" else figures[name] > best[name])


def stalled(config: TrainConfig, summary: Mapping[str, Any], step: int) -> bool:
    """Whether eval_patience evaluations passed since the best one."""
    waited = step - summary.get(BEST, {}).get("step", 0)
    return bool(config.eval_patience) and waited >= config.eval_patience * config.eval_every


def save_now(run: Running, journal: Journal) -> None:
    """Start writing a checkpoint of the steps that are done."""
    with run.clock("checkpoint"):
        run.folder.write_left_out(run.loop.step, run.source.on_checkpoint(run.state.source, run.loop.step))
        journal.writer.flush()  # a resumed run does not repeat these steps, so their metrics must be on disk
        save(run.state, run.loop, run.source, run.checkpoints, run.folder, run.clock, run.provenance)
