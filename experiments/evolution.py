"""Evolution strategies against GRPO in the laboratory, at equal samples.

    python -m experiments.evolution

EGGROLL's members answer greedily, and GRPO samples; both see as many completions of as many prompts. A decoder of one
layer of width 16 starts from a few supervised steps, another one for each seed. The score is the mean reward of greedy
answers to 1,024 prompts that are the same for all. Learning rates and sigma were chosen on another seed.
"""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.in_jax.lab.config import WARM_STEPS
from jaxrl_llm.in_jax.rollout import greedy_reward
from jaxrl_llm.in_jax.settings import LabSettings, make_policy
from jaxrl_llm.in_jax.tasks import get_task
from jaxrl_llm.in_jax.train import QUICK_COMPILE, make_train, warm_start

METHODS: dict[str, dict[str, float]] = {
    "grpo": {"learning_rate": 1e-2},
    "eggroll": {"learning_rate": 1e-2, "sigma": 0.05},
}
SETTINGS = LabSettings(iterations=100, prompts=64, group_size=16, hidden=16, layers=1)


def scores(name: str, seeds: int, settings: LabSettings) -> dict[str, list[list[float]]]:
    """For each method, [before, after, seconds] of each seed on a task."""
    task, found = get_task(name), dict[str, list[list[float]]]()
    prompts = jax.vmap(task.sample)(jax.random.split(jax.random.key(10**6), 1024))
    policy = make_policy(task, settings)
    score = jax.jit(lambda params: jnp.mean(greedy_reward(policy, params, task, prompts)))
    starts = [warm_start(jax.random.key(seed), task, settings, WARM_STEPS[name]) for seed in range(seeds)]
    for method, given in METHODS.items():
        train = make_train(task, method, settings)

        def run(key: Any, start: Any, train: Any = train, given: Any = given) -> Any:
            return train(key, given, start).params

        keys = [jax.random.key(100 + seed) for seed in range(seeds)]
        compiled = jax.jit(run).lower(keys[0], starts[0]).compile(QUICK_COMPILE)
        found[method] = []
        for seed, (key, start) in enumerate(zip(keys, starts, strict=True)):
            begin = time.perf_counter()
            params = jax.block_until_ready(compiled(key, start))
            seconds = time.perf_counter() - begin
            found[method].append([float(score(start)), float(score(params)), seconds])
            print(f"{name}, {method}, seed {seed}: {found[method][-1]}", file=sys.stderr, flush=True)
    return found


def mean_and_error(values: np.ndarray) -> tuple[float, float]:
    """The mean over seeds and its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--tasks", nargs="+", default=["maze", "sorting"], choices=sorted(WARM_STEPS))
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args(arguments)
    rows = [
        "| task | method | before | after | learnt | in standard errors | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in options.tasks:
        for method, each in scores(name, options.seeds, SETTINGS).items():
            before, after, seconds = np.asarray(each).T
            learnt, error = mean_and_error(after - before)
            (first, _), (last, of_last) = mean_and_error(before), mean_and_error(after)
            rows.append(
                f"| {name} | {method} | {first:.3f} | {last:.3f} ± {of_last:.3f} | {learnt:+.3f} ± {error:.3f} | "
                f"{learnt / error:.1f} | {seconds.mean():.1f} |"
            )
    print("\n".join(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
