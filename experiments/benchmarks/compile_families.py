"""Compile time of one update, by family of models: the tiny models of the tests, on this CPU.

    python experiments/benchmarks/compile_families.py [FAMILY ...]

A gradient step on 4 rows of 24 tokens is traced, lowered and compiled, without a cache. Prints CPU seconds of the
process, which other processes change little, the best of three rounds that take the models in turns; the kinds of
layers that the model has; and the ratio to Llama's seconds for each kind.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

import jax  # noqa: E402
from update_ours import GRPO, made_batch, new_learner  # noqa: E402

from jaxrl_llm import load_policy  # noqa: E402
from jaxrl_llm.learner.microbatches import plan_steps  # noqa: E402
from jaxrl_llm.learner.update import update  # noqa: E402

VECTORS = ROOT / "tests" / "vectors"


ROUNDS = 3


def prepared(folder: Path) -> tuple[Any, int]:
    """The arguments of a model's update, and how many kinds of layers it has."""
    policy, params, _ = load_policy(folder)
    learner = new_learner(policy, params)
    batch = made_batch(4, 8, 16, policy.config.known_tokens - 1, 4)
    steps = plan_steps(batch, micro_batches=1, runs=policy.config.recurrent)
    return (learner.policy, GRPO, learner.optimizer, learner.state, batch, steps), len(policy.config.each_kind)


def seconds_of(arguments: Any) -> float:
    """CPU seconds until an update is compiled."""
    jax.clear_caches()
    start = time.process_time()
    update.lower(*arguments).compile()
    return time.process_time() - start


def main() -> None:
    """Measure the families that are named, or all."""
    jax.config.update("jax_enable_compilation_cache", False)
    names = sys.argv[1:] or sorted(path.name for path in VECTORS.iterdir() if path.is_dir())
    models = {name: prepared(VECTORS / name) for name in dict.fromkeys(["llama", *names])}
    taken: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(ROUNDS):
        for name, (arguments, _) in models.items():
            taken[name].append(seconds_of(arguments))
    base = min(taken["llama"])
    for name, (_, kinds) in models.items():
        ratio = min(taken[name]) / base
        print(f"{name}: {min(taken[name]):.2f} s, kinds {kinds}, {ratio:.2f} of llama's, {ratio / kinds:.2f} a kind")


if __name__ == "__main__":
    main()
