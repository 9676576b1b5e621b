"""Compare methods on a small task, all in JAX: does each learn, from the same warm start, and how fast?

    python experiments/lab.py --task addition --algorithms grpo rloo --seeds 3 --output lab.md

A tiny decoder is trained on examples until it earns some reward; each method continues from there by reinforcement
learning only, once per seed. Methods run with the catalogue's defaults, except those in `in_jax.train.LABORATORY`. Left
out: resampling of uninformative groups, and special rollouts (hints, tools, several turns); the last column of the
table names what a method goes without.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm import algorithms
from jaxrl_llm.algorithms.unfinished import missing
from jaxrl_llm.errors import InputError
from jaxrl_llm.in_jax.tasks import TASKS, Task, get_task
from jaxrl_llm.in_jax.train import LABORATORY, QUICK_COMPILE, LabSettings, evaluate_task, make_train, warm_start
from jaxrl_llm.models.policy import Params

# Supervised steps after which the policy earns a part of the reward, but far from all.
WARM_STEPS = {"addition": 120, "sequence_lock": 20}
OPTIONS = {"addition": {"digits": 2, "base": 5}, "sequence_lock": {}}
WINDOW = 10  # last iterations whose mean reward is the final one


class Result(NamedTuple):
    """The result of a method."""

    name: str
    final: np.ndarray  # f64[seeds]: mean reward of the last iterations
    seconds: float  # compilation included
    note: str = ""  # what the method went without
    error: str = ""


def run(
    task: Task, name: str, settings: LabSettings, start: Params, seeds: int, hyperparameters: dict[str, Any]
) -> Result:
    """Train one method with each seed."""
    before = time.perf_counter()
    without = tuple(missing(name))
    train = make_train(task, name, settings, without)
    given = {**LABORATORY.get(name, {}), **hyperparameters}

    def one(key: jax.Array, start: Params) -> jax.Array:
        return train(key, given, start).metrics["reward"]

    keys = jax.random.split(jax.random.key(1), seeds)
    try:
        rewards = jax.jit(jax.vmap(one, (0, None)), compiler_options=QUICK_COMPILE)(keys, start)
    except InputError as error:
        return Result(name, np.full(seeds, np.nan), time.perf_counter() - before, error=str(error))
    final = np.asarray(rewards, np.float64)[:, -WINDOW:].mean(axis=1)
    return Result(name, final, time.perf_counter() - before, f"without {', '.join(without)}" if without else "")


def summary(result: Result, first: np.ndarray) -> dict[str, float]:
    """Mean final reward, its 95 % interval over the seeds, and the gain over the start in standard errors.

    first: f[n], rewards of the start on fresh prompts.
    """
    from scipy import stats

    seeds, mean = len(result.final), float(result.final.mean())
    error = float(result.final.std(ddof=1) / seeds**0.5) if seeds > 1 else float("nan")
    reach = float(stats.t.ppf(0.975, seeds - 1)) * error if seeds > 1 else float("nan")
    gain = mean - float(first.mean())
    both = (error**2 + float(first.var(ddof=1)) / first.size) ** 0.5
    in_errors = gain / both if both > 0 else float("nan")
    return {"mean": mean, "low": mean - reach, "high": mean + reach, "gain": gain, "gain in errors": in_errors}


def row(result: Result, first: np.ndarray) -> str:
    """A line of the table."""
    if result.error:
        return f"| {result.name} | - | - | - | - | {result.seconds:.0f} | {result.error} |"
    s = summary(result, first)
    return (
        f"| {result.name} | {s['mean']:.3f} | {s['low']:.3f} to {s['high']:.3f} | {s['gain']:+.3f} "
        f"| {s['gain in errors']:+.1f} | {result.seconds:.0f} | {result.note} |"
    )


def main(arguments: list[str] | None = None) -> list[Result]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--task", choices=sorted(TASKS), default="addition")
    parser.add_argument("--algorithms", nargs="+", default=algorithms.names(), metavar="NAME", help="default: all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=150)
    parser.add_argument("--learning-rate", type=float, default=LabSettings.learning_rate)
    parser.add_argument("--warm-steps", type=int, help="supervised steps before")
    parser.add_argument("--output", type=Path, help="write the table there, as markdown")
    options = parser.parse_args(arguments)
    for name in options.algorithms:
        algorithms.constructor(name)

    task, settings = get_task(options.task, **OPTIONS[options.task]), LabSettings(iterations=options.iterations)
    steps = WARM_STEPS[options.task] if options.warm_steps is None else options.warm_steps
    start = warm_start(jax.random.key(0), task, settings, steps)
    found = evaluate_task(start, task, settings, jax.random.key(2))
    first = np.asarray(found["reward"], np.float64)
    parts = ", ".join(f"{name} {float(jnp.mean(value)):.3f}" for name, value in found.items())
    lines = [
        f"{options.task}: after {steps} supervised steps {parts}. {options.seeds} seeds, {options.iterations} "
        f"iterations of {settings.prompts} prompts x {settings.group_size} completions, learning rate "
        f"{options.learning_rate:g}. Final: mean of the last {WINDOW} iterations, with 95 % intervals over seeds.",
        "",
        "| method | final reward | 95 % | gain | in standard errors | seconds | note |",
        "|---|---|---|---|---|---|---|",
    ]
    print("\n".join(lines), flush=True)
    results = []
    for name in options.algorithms:
        result = run(task, name, settings, start, options.seeds, {"learning_rate": jnp.float32(options.learning_rate)})
        results.append(result)
        lines.append(row(result, first))
        print(lines[-1], flush=True)
        if options.output:
            options.output.write_text("\n".join(lines) + "\n")
        jax.clear_caches()
    return results


if __name__ == "__main__":
    main()
