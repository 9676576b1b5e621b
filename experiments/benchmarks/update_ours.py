"""Our columns of the update benchmark; started by update.py.

Also: the machine's matrix-product throughput, and the operations that an update needs.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rollout_ours import load
from rollout_worker import peak_memory, random_prompts, serve
from update_fused import fused
from update_worker import BETAS, CLIP, LEARNING_RATE, MAX_GRAD_NORM, questions, random_work, variety

from jaxrl_llm.algorithms import get
from jaxrl_llm.core.trajectory import Trajectories
from jaxrl_llm.core.transform import Objective
from jaxrl_llm.learner.microbatches import Steps, plan_steps
from jaxrl_llm.learner.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.learner.outputs import outputs_of
from jaxrl_llm.learner.train_state import TrainState, init_state
from jaxrl_llm.learner.update import prepare, update
from jaxrl_llm.models import Policy, lora
from jaxrl_llm.models.parameters import combine, parameter_shapes
from jaxrl_llm.objectives import clip, policy_gradient, sequence_mean, token_ratio
from jaxrl_llm.sampling import completion_ids, completion_texts, sample
from jaxrl_llm.utils.process import compiles, count_compiles, limit_heap, trim_heap

GRPO: Objective = policy_gradient(token_ratio(), clip(CLIP, CLIP), sequence_mean())


class Learner(NamedTuple):
    """A policy, its optimiser and its train state."""

    policy: Policy
    optimizer: optax.GradientTransformation
    frozen: Any  # parameters that never learn, or None
    state: TrainState

    @property
    def params(self) -> Any:
        """Of the whole policy."""
        return combine(self.frozen, self.state.params)


def new_learner(policy: Policy, params: Any, *, rank: int = 0, remat: bool = True, moments: Any = "float32") -> Learner:
    """A learner that has taken no step. rank: of LoRA adapters, which then learn alone; 0 for none, where all does."""
    frozen = None
    if rank:
        dtype = jax.tree.leaves(params)[0].dtype
        adapters = lora.init(jax.random.key(0), policy.config, rank, dtype=dtype)
        frozen, params = lora.scaled(params, rank, 2.0 * rank), adapters
    optimizer = make_optimizer(
        OptimizerConfig(
            learning_rate=LEARNING_RATE, beta1=BETAS[0], beta2=BETAS[1], max_grad_norm=MAX_GRAD_NORM, moments=moments
        ),
        1,
    )
    return Learner(dataclasses.replace(policy, remat=remat), optimizer, frozen, init_state(params, optimizer))


def made_batch(batch: int, prompt: int, new: int, vocabulary: int, group: int) -> Trajectories:
    """A scored batch of `random_work` without log-probabilities of its sampling."""
    work, N, L = random_work(batch, prompt, new, vocabulary, group), batch, prompt + new
    action = jnp.broadcast_to(jnp.arange(L) >= prompt, (N, L))
    number = jnp.arange(N, dtype=jnp.int32) // group
    return Trajectories(
        tokens=jnp.asarray([p + c for p, c in zip(work.prompts, work.completions, strict=True)], jnp.int32),
        token_mask=jnp.ones((N, L), bool), action_mask=action, behaviour_logp=jnp.zeros((N, L)),
        policy_step=jnp.zeros((N, L), jnp.int32), turn=jnp.where(action, 0, -1), group=number, prompt_id=number,
        truncated=jnp.zeros(N, bool), advantages=jnp.asarray(work.advantages)[:, None] * action,
    )  # fmt: skip


def one_step(learner: Learner, batch: Trajectories, steps: Steps) -> tuple[Learner, dict[str, jax.Array]]:
    """The learner after a gradient step, and its metrics, when they are there."""
    state, metrics = update(
        learner.policy, GRPO, learner.optimizer, learner.state, batch, steps=steps, frozen=learner.frozen
    )
    return jax.block_until_ready((learner._replace(state=state), metrics))


def steps(
    learner: Learner, *, batch: int, prompt: int, new: int, group: int, micro_batches: int, count: int
) -> tuple[Learner, dict[str, Any]]:
    """`count` gradient steps on one batch, planned anew each time; `group` rows share a prompt.

    In the first, sampler and trainer are the same policy.
    """
    rows = made_batch(batch, prompt, new, learner.policy.config.vocab_size, group)
    slices = plan_steps(rows, micro_batches=micro_batches)
    rows = rows.replace(behaviour_logp=outputs_of(learner.policy, learner.params, rows, slices).logp)
    jax.block_until_ready(rows)
    count_compiles()
    answers = []
    for _ in range(count):
        before, begin = compiles()[0], time.perf_counter()
        plan = plan_steps(rows, micro_batches=micro_batches)
        planned = time.perf_counter() - begin
        learner, metrics = one_step(learner, rows, plan)
        seconds = time.perf_counter() - begin
        answers.append({
            "seconds": seconds, "planned": planned, "compiles": compiles()[0] - before,
            "grad_norm": float(metrics["grad_norm"]), "finite": float(metrics["finite"]),
        })  # fmt: skip
    return learner, {"answers": answers, "tokens": batch * (prompt + new)}


def xla_memory(
    learner: Learner, *, batch: int, prompt: int, new: int, group: int, micro_batches: int
) -> dict[str, Any]:
    """Bytes by XLA's memory analysis of the compiled update: temporaries, and all that it has at once."""
    rows = made_batch(batch, prompt, new, learner.policy.config.vocab_size, group)
    plan = plan_steps(rows, micro_batches=micro_batches)
    program = update.lower(
        learner.policy, GRPO, learner.optimizer, learner.state, rows, steps=plan, frozen=learner.frozen
    ).compile()
    found: Any = program.memory_analysis()
    held = found.argument_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    return {"temporaries": found.temp_size_in_bytes, "whole": held + found.temp_size_in_bytes}


def iterations(
    learner: Learner, *, prompts: int, samples: int, prompt: int, new: int, micro_batches: int, count: int
) -> tuple[Learner, dict[str, Any]]:
    """`count` iterations of GRPO: sample, score, prepare, update. No token ends a completion.

    prompt: tokens of random prompts, where the model has no tokenizer and cannot be asked questions.
    """
    policy, algorithm = learner.policy, get("grpo", clip_low=CLIP, clip_high=CLIP, kl_coefficient=0.0)
    memory, tokenizer, key = algorithm.transform.init(), policy.tokenizer, jax.random.key(0)
    if tokenizer is None:
        asked: list[Any] = random_prompts(prompts * count, prompt, policy.config.vocab_size)
    else:
        asked = questions(prompts * count)
    count_compiles()
    answers = []
    for number in range(count):
        before, begin = compiles()[0], time.perf_counter()
        batch = sample(
            policy, learner.params, asked[number * prompts : (number + 1) * prompts], jax.random.fold_in(key, number),
            group_size=samples, max_new_tokens=new, stop_token_ids=[-1], policy_step=number,
        )  # fmt: skip
        done = completion_ids(batch) if tokenizer is None else completion_texts(tokenizer, batch)
        scores = np.array([variety(completion) for completion in done], np.float32)
        sampled = time.perf_counter() - begin
        batch = batch.replace(rewards={"variety": jnp.asarray(scores)}, reward=jnp.asarray(scores))
        trim_heap()  # as the loop does
        plan = plan_steps(batch, micro_batches=micro_batches)
        memory, batch = prepare(algorithm.transform, memory, batch)
        learner, metrics = one_step(learner, batch, plan)
        seconds = time.perf_counter() - begin
        tokens = int(np.sum(np.asarray(batch.action_mask)))
        if tokens != prompts * samples * new:
            raise RuntimeError(f"{tokens} tokens came of {prompts * samples} completions of {new}")
        answers.append({
            "seconds": seconds, "sampled": sampled, "compiles": compiles()[0] - before,
            "reward": float(scores.mean()), "grad_norm": float(metrics["grad_norm"]),
        })  # fmt: skip
    return learner, {"answers": answers, "tokens": prompts * samples * new}


def needed_flops(learner: Learner, *, batch: int, prompt: int, new: int, group: int, micro_batches: int = 1) -> float:
    """Operations that a gradient step needs, a product and its sum being two; what is done twice counts once.

    6 x (matrices of the layers x tokens + vocabulary x hidden size x new tokens)
      + 12 x heads x head size x (tokens that each token sees, itself too, summed over tokens and layers)

    A prompt that `group` rows share counts once; of experts, those that a token goes to. Where only adapters learn,
    the other matrices take 4 in the place of 6.
    """
    config = learner.policy.config
    sets, total = batch // group, prompt + new
    tokens = sets * prompt + batch * new
    matrices = 0.0
    for path, shape in parameter_shapes(config).items():
        if path[0] == "layers" and not path[-1].endswith(("norm", "bias")):
            of_experts = config.num_experts and path[-1] in ("gate", "up", "down")
            matrices += math.prod(shape) * (config.experts_per_token / config.num_experts if of_experts else 1)
    seen = 0
    for window in config.window_of_layer:
        each = np.minimum(np.arange(1, total + 1), window or total)
        seen += sets * int(each[:prompt].sum()) + batch * int(each[prompt:].sum())
    unembedded = config.vocab_size * config.hidden_size * batch * new
    frozen = learner.frozen is not None
    flops = (4 if frozen else 6) * (matrices * tokens + unembedded) + 12 * config.num_heads * config.head_dim * seen
    if frozen:
        flops += 6 * sum(x.size for x in jax.tree.leaves(learner.state.params)) * tokens
    return float(flops)


def matrix_flops(dtype: str, size: int = 0) -> dict[str, Any]:
    """Operations a second of a product of two square matrices: the best of ten."""
    size = size or (2048 if jax.devices()[0].platform == "cpu" else 8192)
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    product, times = jax.jit(jnp.matmul), []
    jax.block_until_ready(product(x, x))
    for _ in range(10):
        begin = time.perf_counter()
        jax.block_until_ready(product(x, x))
        times.append(time.perf_counter() - begin)
    return {"flops_per_second": 2 * size**3 / min(times)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", required=True)
    parser.add_argument("--param-dtype")
    parser.add_argument("--activations")
    options = parser.parse_args()
    held: list[Learner] = []

    def peak() -> dict[str, Any]:
        device = jax.devices()[0]
        kept = device.memory_stats() if device.platform != "cpu" else None
        return {"peak_bytes": kept["peak_bytes_in_use"] if kept else peak_memory()}

    def begin(**settings: Any) -> dict[str, Any]:
        start = time.perf_counter()
        limit_heap()  # as training does
        policy, params, _ = load(options.model, options.dtype, None, options.param_dtype)
        policy = dataclasses.replace(policy, activations=options.activations and jnp.dtype(options.activations))
        held.append(jax.block_until_ready(new_learner(policy, params, **settings)))
        device = jax.devices()[0]
        return {
            "version": f"jaxrl_llm, JAX {jax.__version__}",
            "platform": device.platform,
            "device": device.device_kind,
            "seconds": time.perf_counter() - start,
        } | peak()

    def trained(task: Any) -> Any:
        def run(**case: Any) -> dict[str, Any]:
            learner, answer = task(held.pop(), **case)  # popped: an update takes the state's buffers
            held.append(learner)
            return answer | peak()

        return run

    serve({
        "load": begin,
        "steps": trained(steps),
        "iterations": trained(iterations),
        "xla_memory": lambda **case: xla_memory(held[0], **case),
        "needed_flops": lambda **case: {"flops": needed_flops(held[0], **case)},
        "matrix_flops": lambda: matrix_flops(options.dtype),
        "fused": lambda **case: {"ways": fused(**case, dtype=options.dtype)},
    })  # fmt: skip


if __name__ == "__main__":
    main()
