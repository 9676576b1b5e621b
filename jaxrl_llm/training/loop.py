"""The host loop: sample, score, prepare, update. Plain lines over the same parts that a script would use."""

from __future__ import annotations

import logging
from contextlib import ExitStack, closing
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_llm.algorithms import Algorithm, get
from jaxrl_llm.compilation import compiles, count_compiles, use_compile_cache
from jaxrl_llm.data import PromptStream
from jaxrl_llm.distributed import check_rows, data_mesh, replicate, shard_rows
from jaxrl_llm.errors import InputError, unknown
from jaxrl_llm.models import load_policy
from jaxrl_llm.models.outputs import layout_of
from jaxrl_llm.models.policy import Params
from jaxrl_llm.reporting import Progress, write_report
from jaxrl_llm.reporting.writers import read_json
from jaxrl_llm.rewards.shaping import soft_overlong_penalty
from jaxrl_llm.sampling import sample
from jaxrl_llm.training.checkpoints import Checkpoints
from jaxrl_llm.training.config import TrainConfig, from_dict, to_dict
from jaxrl_llm.training.diagnose import NotFiniteError, not_finite
from jaxrl_llm.training.evaluate import evaluate
from jaxrl_llm.training.optimizer import learning_rate, make_optimizer
from jaxrl_llm.training.record import about, describe, facts, outcome, tally, writers
from jaxrl_llm.training.rollout import make_rewards, prompt_sets, score_batch
from jaxrl_llm.training.run_folder import Clock, RunFolder
from jaxrl_llm.training.update import init_state, prepare, provide, update
from jaxrl_llm.transform import Transform, chain

logger = logging.getLogger("jaxrl_llm.training")


def train(config: TrainConfig, *, resume: bool = False) -> dict[str, Any]:
    """Run (or go on with) a training run and return its summary, which is also in summary.json.

    All state is in the parameters, the optimiser, the transforms and the position in the prompts; each is in every
    checkpoint, and the randomness of a step comes from (seed, step). So a run that was killed and resumed gives the
    same parameters and metrics, bit by bit, as one that was not.

    Raises InputError for bad input, NotFiniteError where a loss is not finite (the last good checkpoint stands).
    """
    use_compile_cache()
    count_compiles()
    folder = RunFolder(config.output)
    algorithm = make_algorithm(config)
    mesh = data_mesh()
    check_rows(config.prompts_per_step * config.group_size, config.minibatches, config.micro_batches, mesh.size)
    clock = Clock()
    with clock("load"):
        policy, params, tokenizer = load_policy(
            config.model, dtype=config.dtype, param_dtype=config.param_dtype, remat=config.remat
        )
        prompts, held_out = prompt_sets(config, tokenizer, policy.config.max_positions)
        columns = set(prompts.rows[0]) & set((held_out or prompts).rows[0])
        rewards = make_rewards(config, sorted(columns))
        if config.eval_reward is not None and config.eval_reward not in (known := [r.name for r in rewards]):
            raise unknown("reward to judge by", config.eval_reward, known)
    if not resume:
        folder.create(to_dict(config))
    params = replicate(params, mesh)
    # The update donates its parameters, so a reference needs buffers of its own.
    initial = jax.tree.map(jnp.copy, params) if "reference_logp" in algorithm.needs else None
    optimizer = make_optimizer(config.optimizer, config.steps * config.epochs * config.minibatches)
    rate = learning_rate(config.optimizer, config.steps * config.epochs * config.minibatches)
    # Everything is on the mesh from the start: a step over arrays of another placement would be compiled again.
    state, memory = replicate((init_state(params, optimizer), algorithm.transform.init()), mesh)
    del params
    stream = PromptStream(prompts.rows, batch_size=config.prompts_per_step, seed=config.seed)
    checkpoints = Checkpoints(folder.checkpoints, config.keep_checkpoints)
    first, counts = 0, dict[str, int]()
    restored = checkpoints.latest(state.params, {"rest": state[1:], "memory": memory}) if resume else None
    if restored:
        first = restored.step
        rest, memory = replicate((restored.state["rest"], restored.state["memory"]), mesh)
        state = type(state)(replicate(restored.params, mesh), *rest)
        stream.restore(restored.meta["prompts"])
        clock, counts = Clock(restored.meta["seconds"]), restored.meta["counts"]
    checkpoints.forget_after(first)
    summary: dict[str, Any] = read_json(folder.summary) if resume else {}
    # Completions of the evaluation before training count as of step -1; they come again if its result was lost.
    folder.rewind(first if first or "eval_before" in summary else -1)

    def test(name: str, step: int, params: Params) -> None:
        assert held_out is not None
        with clock("evaluate"):
            result = evaluate(
                policy, params, held_out, rewards, judge=config.eval_reward, max_new_tokens=config.max_new_tokens,
                stop=config.stop, rows_at_once=config.rows_at_once or config.prompts_per_step * config.group_size,
            )  # fmt: skip
        summary[name] = result.figures
        folder.log_completions(step, name, tokenizer, result.scored, held_out.rows, groups=8)
        folder.write(folder.summary, summary)

    with ExitStack() as stack:
        writer = stack.enter_context(closing(writers(config, folder, first)))
        stack.callback(checkpoints.close)
        progress = stack.enter_context(Progress(config.steps, first))
        for text in about(config, prompts, first, policy, resume):
            progress.say(text)
        if held_out is not None and "eval_before" not in summary:
            if first:
                progress.say("no evaluation from before training is left; eval_before is of the resumed parameters")
            test("eval_before", -1, state.params)
        if "eval_before" in summary:
            progress.say(f"before training: {describe(summary['eval_before'])}")
        key = jax.random.key(config.seed)
        for step in range(first, config.steps):
            step_key = jax.random.fold_in(key, step)
            before = dict(clock.seconds)
            rows, ids = next(stream)
            with clock("sample"):
                batch = sample(
                    policy, state.params, [prompts.ids[i] for i in ids], step_key, prompt_ids=ids.tolist(),
                    group_size=config.group_size, max_new_tokens=config.max_new_tokens, policy_step=step,
                    temperature=config.temperature, top_p=config.top_p, top_k=config.top_k, min_p=config.min_p,
                    stop=config.stop, rows_at_once=config.rows_at_once, mesh=mesh,
                )  # fmt: skip
            with clock("score"):
                scored = score_batch(rewards, tokenizer, rows, batch)
            with clock("update"):
                layout = layout_of(batch, config.group_size)
                sources: dict[str, Any] = {"reference_logp": initial, "old_logp": state.params}
                batch = provide(policy, algorithm.needs, sources, shard_rows(scored.batch, mesh), layout)
                memory, batch = prepare(algorithm.transform, memory, batch)
                taken = int(state.step)
                state, found = update(
                    policy, algorithm.objective, optimizer, state, batch, step_key, layout=layout, epochs=config.epochs,
                    minibatches=config.minibatches, micro_batches=config.micro_batches,
                )  # fmt: skip
                metrics = {name: float(value) for name, value in found.items()}
            if metrics.pop("finite") < 1:
                what = not_finite(policy, algorithm.objective, state.params, batch, layout)
                raise NotFiniteError(
                    f"step {step + 1}: {what} is not finite; the parameters were not changed by it, and the "
                    f"checkpoints in {folder.checkpoints} are good. Lower the learning rate, or look at the rewards of "
                    "this step"
                )
            scored = scored._replace(batch=batch)
            metrics |= facts(scored, config, sum(clock.seconds.values()) - sum(before.values()))
            metrics |= {f"seconds/{name}": value - before.get(name, 0.0) for name, value in clock.seconds.items()}
            metrics |= {"learning_rate": float(rate(taken)), "compiles": compiles()[0]}
            counts, remarks = tally(counts, step, metrics, config)
            for text in remarks:
                progress.say(text)
            writer.write(step, metrics)
            if config.log_completions_every and (step % config.log_completions_every == 0 or step == config.steps - 1):
                folder.log_completions(step, "train", tokenizer, scored, rows)
            progress.update(step, metrics)
            done = step + 1
            if config.eval_every and held_out is not None and done % config.eval_every == 0 and done < config.steps:
                test("eval_latest", step, state.params)
                progress.say(f"after step {done}: {describe(summary['eval_latest'])}")
            if done == config.steps or (config.checkpoint_every and done % config.checkpoint_every == 0):
                with clock("checkpoint"):
                    meta = {"prompts": stream.state(), "config": to_dict(config), "counts": counts}
                    meta["seconds"] = clock.seconds
                    checkpoints.save(done, state.params, {"rest": state[1:], "memory": memory}, meta)
        if held_out is not None:
            test("eval_after", config.steps, state.params)
            progress.say(f"after training: {describe(summary['eval_after'])}")
        with clock("checkpoint"):
            checkpoints.wait()
        summary |= outcome(config, counts, clock.seconds)
        summary["prompts"] = {"training": len(prompts.rows), "skipped": prompts.skipped, "truncated": prompts.shortened}
        folder.write(folder.summary, summary)
        for text in summary["warnings"]:
            progress.say(f"warning: {text}")
    try:
        write_report(folder.path)
    except InputError as error:  # e.g. no matplotlib; the run itself is done and saved
        logger.warning("there is no report: %s", error)
    return summary


def resume(path: str) -> dict[str, Any]:
    """Go on with the run in a folder, as if it had never stopped."""
    return train(from_dict({**RunFolder(path).read_config(), "output": path}), resume=True)


def make_algorithm(config: TrainConfig) -> Algorithm:
    """The configured method, with the soft overlong penalty in front where it is on."""
    algorithm = get(config.algorithm, **config.hyperparameters)
    if not config.overlong_tokens:
        return algorithm
    penalty: Transform = soft_overlong_penalty(config.max_new_tokens, config.overlong_tokens)
    return Algorithm(chain(penalty, algorithm.transform), algorithm.objective)
