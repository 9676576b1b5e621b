"""Preparation and objective of every method against the policy's own update, at the same batch.

    python experiments/benchmarks/objectives.py                       # all methods, [512, 1024], SmolLM2-135M

For each method, seconds of its compiled transform and of its objective's loss with gradient, and their share of the
update of the model at that size. The update is timed on a few rows and scaled: its time is proportional to the tokens.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import algorithms
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.needs import fill_in
from jaxrl_llm.core.trajectory import PolicyOutputs, Trajectories
from jaxrl_llm.learner.optimizer import OptimizerConfig, make_optimizer
from jaxrl_llm.learner.train_state import init_state
from jaxrl_llm.learner.update import prepare, update
from jaxrl_llm.models import load_policy


def made_up_batch(rows: int, length: int, vocabulary: int, group_size: int = 8) -> Trajectories:
    """Completions of uneven lengths after prompts of 16 tokens, right and wrong ones in every group."""
    random = np.random.default_rng(0)
    place, end = np.arange(length), random.integers(length // 2, length + 1, rows)[:, None]
    action = (place >= 16) & (place < end)
    group = np.arange(rows, dtype=np.int32) // group_size
    tokens = random.integers(0, vocabulary, (rows, length), dtype=np.int32)
    return Trajectories(
        tokens=jnp.asarray(tokens),
        token_mask=jnp.asarray(place < end),
        action_mask=jnp.asarray(action),
        behaviour_logp=jnp.asarray(-random.exponential(1.0, (rows, length)) * action, jnp.float32),
        policy_step=jnp.zeros((rows, length), jnp.int32),
        turn=jnp.asarray(np.where(action, 0, -1).astype(np.int32)),
        group=jnp.asarray(group),
        prompt_id=jnp.asarray(group),
        truncated=jnp.zeros(rows, bool),
        reward=jnp.asarray(random.integers(0, 2, rows), jnp.float32),
        rewards={"right": jnp.asarray(random.integers(0, 2, rows), jnp.float32)},
        entropy=jnp.asarray(random.exponential(1.0, (rows, length)) * action, jnp.float32),
    )


def seconds(f: Callable[..., Any], *arguments: Any, repeats: int = 3) -> float:
    """The least of some runs, after one that compiles."""
    jax.block_until_ready(f(*arguments))
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(f(*arguments))
        times.append(time.perf_counter() - begin)
    return min(times)


def of_method(algorithm: Algorithm, batch: Trajectories) -> tuple[float, float]:
    """Seconds of preparing the batch, and of the objective's loss and gradient."""
    full, extras, _ = fill_in(batch, algorithm.needs)
    memory = algorithm.transform.init()
    outputs = PolicyOutputs(full.behaviour_logp + 0.01, full.need("entropy"), extras or None)

    def loss(outputs: PolicyOutputs, ready: Trajectories) -> jax.Array:
        return algorithm.objective(outputs, ready)[0]

    _, ready = prepare(algorithm.transform, memory, full)
    before = seconds(lambda: prepare(algorithm.transform, memory, full))
    return before, seconds(jax.jit(jax.value_and_grad(loss)), outputs, ready)


def of_update(model: str, rows: int, length: int, sample_rows: int) -> float:
    """Seconds of a gradient step of the model on the whole batch, from one on a few of its rows."""
    policy, params, _ = load_policy(model)
    grpo = algorithms.get("grpo", kl_coefficient=0.0)
    optimizer = make_optimizer(OptimizerConfig(), 1)
    batch = made_up_batch(sample_rows, length, policy.config.vocab_size, group_size=sample_rows)
    _, batch = grpo.transform.apply((), batch)
    state, times = init_state(params, optimizer), []
    for _ in range(3):
        begin = time.perf_counter()
        state, _ = update(policy, grpo.objective, optimizer, state, batch)
        jax.block_until_ready(state)
        times.append(time.perf_counter() - begin)
    return min(times[1:]) * rows / sample_rows


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--algorithms", nargs="+", default=algorithms.names(), metavar="NAME")
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--sample-rows", type=int, default=2, help="rows on which the update is timed")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args(arguments)
    whole = of_update(options.model, options.rows, options.length, options.sample_rows)
    lines = [
        f"[{options.rows}, {options.length}], {jax.device_count()} {jax.devices()[0].platform} device(s): an update of "
        f"{options.model} takes {whole:,.0f} s (timed on {options.sample_rows} rows and scaled).",
        "",
        "| method | prepare, s | objective and gradient, s | share of the update |",
        "|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    batch = made_up_batch(options.rows, options.length, 1000)
    for name in options.algorithms:
        before, after = of_method(algorithms.get(name), batch)
        lines.append(f"| {name} | {before:.3f} | {after:.3f} | {(before + after) / whole:.3%} |")
        print(lines[-1], flush=True)
        jax.clear_caches()
    if options.output:
        options.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
