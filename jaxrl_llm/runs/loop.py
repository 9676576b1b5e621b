"""The host loop: sample, score, prepare, update. Plain lines over the same parts that a script would use."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import heap
from jaxrl_llm.compilation import compiles, count_compiles, use_compile_cache
from jaxrl_llm.distributed import replicate, shard_rows
from jaxrl_llm.errors import InputError
from jaxrl_llm.interrupts import interruptible, stop_if
from jaxrl_llm.models.lora import join
from jaxrl_llm.models.policy import Params
from jaxrl_llm.objectives.values import value_loss
from jaxrl_llm.reporting import Progress, write_report
from jaxrl_llm.runs.changes import ACCEPT, check_changes, settings_to_compare
from jaxrl_llm.runs.checkpoints import Checkpoints
from jaxrl_llm.runs.config import TrainConfig, to_dict
from jaxrl_llm.learner.diagnose import NotFiniteError, not_finite, not_finite_in, refusal
from jaxrl_llm.runs.evaluate import evaluate
from jaxrl_llm.learner.groups import fill_up
from jaxrl_llm.runs.inputs import Inputs, read_inputs
from jaxrl_llm.runs.lock import locked
from jaxrl_llm.learner.provide import provide
from jaxrl_llm.runs.record import about, describe, facts, outcome, tally, writers
from jaxrl_llm.runs.run_folder import Clock, RunFolder
from jaxrl_llm.runs.rollout import strategy_of
from jaxrl_llm.runs.setup import Parts, needs_values, set_up
from jaxrl_llm.runs.source import source_of
from jaxrl_llm.learner.signal import signal
from jaxrl_llm.learner.steps import filled, plan_steps
from jaxrl_llm.learner.update import TrainState, prepare, update
from jaxrl_llm.trajectory import Trajectories, map_rows

logger = logging.getLogger("jaxrl_llm.training")


def train(
    config: TrainConfig, *, resume: bool = False, inputs: Inputs | None = None, accept_changed_inputs: bool = False
) -> dict[str, Any]:
    """Run (or go on with) a training run and return its summary, which is also in summary.json.

    All state is in the parameters, the optimiser, the transforms, the position in the prompts and the pool of begun
    completions; each is in every checkpoint, and the randomness of a step comes from (seed, step). So a run that was
    killed and resumed gives the same parameters and metrics, bit by bit, as one that was not.

    inputs: prompts and rewards, where they have been read already (`read_inputs`, within its context).
    accept_changed_inputs: resume although settings, prompts, rewards or the model are not what they were.

    Raises InputError for bad input, before anything is made; where the run is in use by another process; and on resume
    where there are checkpoints of which none can be used, or they are of other inputs. NotFiniteError where a loss, a
    gradient or a new parameter is not finite (the last good checkpoint stands). KeyboardInterrupt after Ctrl-C.
    """
    if inputs is None:
        with read_inputs(config, resume=resume) as inputs:
            return train(config, resume=resume, inputs=inputs, accept_changed_inputs=accept_changed_inputs)
    heap.keep_little()
    use_compile_cache()
    count_compiles()
    clock = Clock()
    with ExitStack() as stack:
        interrupted = stack.enter_context(interruptible())
        with clock("load"):
            parts, state, memory = set_up(config, inputs)
        stop_if(interrupted())
        folder = RunFolder(config.output)
        if not resume:
            folder.path.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder.path))
            folder.create(to_dict(config))
        summary = _run(config, parts, state, memory, folder, clock, interrupted, resume, accept_changed_inputs)
        try:
            write_report(folder.path)
        except (InputError, OSError) as error:  # e.g. no matplotlib; the run itself is done and saved
            logger.warning("there is no report: %s", error)
        return summary


def _run(
    config: TrainConfig,
    parts: Parts,
    state: TrainState,
    memory: Any,
    folder: RunFolder,
    clock: Clock,
    interrupted: Callable[[], bool],
    resume: bool,
    accept_changed_inputs: bool,
) -> dict[str, Any]:
    """`train`, once all is set up."""
    source, strategy = source_of(config, parts, clock), strategy_of(config, parts.algorithm)
    source_state = source.init()
    algorithm, policy, prompts, held_out = parts.algorithm, parts.policy, parts.prompts, parts.held_out
    checkpoints = Checkpoints(folder.checkpoints, config.keep_checkpoints)
    record = {"settings": settings_to_compare(config, os.getcwd()), "inputs": parts.digests}
    first, counts, feedback, remarks = 0, dict[str, int](), dict[str, float](), list[str]()

    def changes(meta: dict[str, Any]) -> list[str]:
        return check_changes(meta, config, os.getcwd(), parts.digests, accept_changed_inputs)

    now = {"rest": state[1:], "memory": memory}
    restored = checkpoints.latest(state.params, now, check=changes) if resume else None
    if restored:
        remarks = changes(restored.meta)
        first, feedback = restored.step, restored.meta["feedback"]
        if first > config.steps:
            raise InputError(f"the checkpoint is of step {first}, but steps is {config.steps}: raise it to go on")
        rest, memory = replicate((restored.state["rest"], restored.state["memory"]), parts.mesh)
        state = type(state)(replicate(restored.params, parts.mesh), *rest)
        try:
            source_state = source.load(restored.meta["source"], restored.arrays)
        except InputError as error:  # there are more prompts, or fewer
            if not accept_changed_inputs:
                raise
            remarks.append(f"the prompts are drawn from the beginning of an epoch ({error})")
        clock.seconds |= {"load": clock.seconds["load"] + restored.meta["seconds"].pop("load", 0.0)}
        clock.seconds |= restored.meta["seconds"]
        counts = restored.meta["counts"]
    summary: dict[str, Any] = {}
    if resume:
        summary = folder.read_summary()
        if restored:  # the file may tell of later steps
            summary = restored.meta.get("summary", summary)
        wrong = folder.check_logs(first, config.checkpoint_every, restored.meta.get("logs", {}) if restored else {})
        if wrong and not accept_changed_inputs:
            raise InputError(f"{'; '.join(wrong)}. Nothing was changed; {ACCEPT} goes on all the same")
        remarks += wrong
        # Only now, when nothing can be refused any more.
        remarks += [f"a damaged checkpoint is now {path}" for path in checkpoints.set_aside_after(first)]
    # Completions of the evaluation before training count as of step -1; they come again if its result was lost.
    folder.rewind(first if first or "eval_before" in summary else -1)

    def test(name: str, step: int, params: Params) -> None:
        assert held_out is not None
        with clock("evaluate"):
            result = evaluate(
                policy, params, held_out, parts.rewards, judge=config.eval_reward, max_new_tokens=config.max_new_tokens,
                stop=config.stop, slots=config.slots or config.prompts_per_step * config.group_size,
            )  # fmt: skip
        summary[name] = result.figures
        folder.log_completions(step, name, parts.tokenizer, result.scored, held_out.rows, groups=8)
        folder.write(folder.summary, summary)

    with ExitStack() as stack:
        writer = stack.enter_context(closing(writers(config, folder, first)))
        stack.callback(checkpoints.close)
        progress = stack.enter_context(Progress(config.steps, first))
        for text in [*about(config, prompts, first, policy, resume, strategy), *remarks]:
            progress.say(text)
        if held_out is not None and "eval_before" not in summary:
            if first:
                progress.say("no evaluation from before training is left; eval_before is of the resumed parameters")
            test("eval_before", -1, join(parts.frozen, state.params))
            stop_if(interrupted())
        if "eval_before" in summary:
            progress.say(f"before training: {describe(summary['eval_before'])}")
        key, warm_up = jax.random.key(config.seed), value_loss()
        for step in range(first, config.steps):
            step_key = jax.random.fold_in(key, step)
            before = dict(clock.seconds)
            params = join(parts.frozen, state.params)
            collected, source_state = source.next(source_state, params, step_key, step)
            stop_if(interrupted())
            scored = collected.scored
            heap.give_back()
            with clock("update"):
                batch = fill_up(scored.batch, config.prompts_per_step * config.group_size, config.group_size)
                steps = plan_steps(
                    batch, epochs=config.epochs, minibatches=config.minibatches, micro_batches=config.micro_batches,
                    seed=(config.seed, step), mesh=parts.mesh,
                )  # fmt: skip
                batch = shard_rows(batch, parts.mesh)
                batch = provide(policy, algorithm.needs, params, parts.reference, batch, steps=steps)
                batch = with_feedback(batch, feedback) if "feedback" in algorithm.needs else batch
                memory, batch = prepare(algorithm.transform, memory, batch)
                taken, warming = int(state.step), step < config.critic_steps and needs_values(algorithm)
                state, found = update(
                    policy, warm_up if warming else algorithm.objective, parts.optimizer, state, batch,
                    steps=steps, only="critic" if warming else None, frozen=parts.frozen,
                )  # fmt: skip
                metrics = {name: float(value) for name, value in found.items()}
            if (finite := metrics.pop("finite")) < 1:
                what = not_finite(
                    policy, warm_up if warming else algorithm.objective, join(parts.frozen, state.params), batch, steps,
                    state=state, optimizer=parts.optimizer, frozen=parts.frozen, only="critic" if warming else None,
                )  # fmt: skip
                raise NotFiniteError(
                    f"{refusal(step + 1, what, finite, steps)}, and the checkpoints in {folder.checkpoints} are good. "
                    "Lower the learning rate, or look at the rewards of this step"
                )
            feedback = {**metrics, "updates": feedback.get("updates", 0.0) + 1}
            metrics["signal"] = signal(batch)
            # What was scored is written down, not what a method's transform made of it, nor rows that fill up.
            if (rows := len(scored.texts)) < batch.tokens.shape[0]:
                batch = map_rows(lambda x, rows=rows: x[:rows], batch)
            if not np.array_equal(batch.need("reward"), scored.batch.need("reward"), equal_nan=True):
                metrics["reward/shaped"] = float(np.nanmean(batch.need("reward")))
            scored = scored._replace(batch=batch.replace(reward=scored.batch.reward, rewards=scored.batch.rewards))
            took = sum(clock.seconds.values()) - sum(before.values())
            metrics |= facts(scored, config, took) | collected.metrics
            metrics["tokens_per_second"] = metrics["completion/tokens"] / max(took, 1e-9)
            metrics |= {f"seconds/{name}": value - before.get(name, 0.0) for name, value in clock.seconds.items()}
            metrics |= {"learning_rate": float(parts.rate(taken)), "compiles": compiles()[0]}
            metrics["packing/filled"] = filled(steps)
            stop_if(interrupted())
            counts, remarks = tally(counts, step, metrics, config)
            for text in remarks:
                progress.say(text)
            # NaN there: of completions that were finished in the step, where none was.
            unknown = {name for name, value in collected.metrics.items() if np.isnan(value)}
            metrics = {name: value for name, value in metrics.items() if name not in unknown}
            writer.write(step, metrics)
            if config.log_completions_every and (step % config.log_completions_every == 0 or step == config.steps - 1):
                folder.log_completions(step, "train", parts.tokenizer, scored, collected.rows)
            progress.update(step, metrics)
            done = step + 1
            if config.eval_every and held_out is not None and done % config.eval_every == 0 and done < config.steps:
                test("eval_latest", step, join(parts.frozen, state.params))
                progress.say(f"after step {done}: {describe(summary['eval_latest'])}")
                stop_if(interrupted())
            if done == config.steps or (config.checkpoint_every and done % config.checkpoint_every == 0):
                with clock("checkpoint"):
                    if name := not_finite_in({"parameters": state.params, "moments": state.optimizer}):
                        raise NotFiniteError(
                            f"step {done}: {name} is not finite; nothing of step {done} is saved, and the checkpoints "
                            f"in {folder.checkpoints} are good"
                        )
                    writer.flush()  # what is logged of these steps must not be lost once they are not taken again
                    saved, begun = source.save(source_state)
                    meta = {"source": saved, "counts": counts, "feedback": feedback}
                    meta |= {"seconds": clock.seconds, "logs": folder.logs(), "summary": summary, **record}
                    checkpoints.save(done, state.params, {"rest": state[1:], "memory": memory}, meta, begun)
                stop_if(interrupted())
        if held_out is not None:
            test("eval_after", config.steps, join(parts.frozen, state.params))
            stop_if(interrupted())
            progress.say(f"after training: {describe(summary['eval_after'])}")
        with clock("checkpoint"):
            checkpoints.wait()
        summary |= outcome(config, counts, clock.seconds)
        summary["prompts"] = {
            "training": len(prompts.rows), "skipped": prompts.skipped, "truncated": prompts.shortened,
            "conflicting": prompts.conflicting,
        }  # fmt: skip
        folder.write(folder.summary, summary)
        for text in summary["warnings"]:
            progress.say(f"warning: {text}")
    return summary


def resume(path: str, accept_changed_inputs: bool = False) -> dict[str, Any]:
    """Go on with the run in a folder, as if it had never stopped; see `train`."""
    return train(RunFolder(path).read_config(), resume=True, accept_changed_inputs=accept_changed_inputs)


def with_feedback(batch: Trajectories, feedback: dict[str, float]) -> Trajectories:
    """The batch with the metrics of the last update, if there was one."""
    return batch.replace(feedback={name: jnp.float32(value) for name, value in feedback.items()} or None)
