"""Time and memory of curricula over a million prompts: python experiments/benchmarks/curricula.py

A step is select, counts and observe, of 512 prompts with 8 samples each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxrl_llm.core.source import Step
from jaxrl_llm.curriculum.budgets import by_bound, by_failure, by_mixed, divide
from jaxrl_llm.curriculum.compose import choose_prompts
from jaxrl_llm.curriculum.scores import drop_solved, least_tried, near_target, thompson, uncertain

CURRICULA = {
    "uncertain, counts": choose_prompts(uncertain(), divide(), prior=(0.5, 0.5), kept=0.875),
    "near_target, counts": choose_prompts(near_target(), divide(by_bound())),
    "thompson, counts": choose_prompts(thompson(), divide(by_mixed()), noise=0.0, kept=0.9, faded=0.95),
    "drop_solved, counts": choose_prompts(least_tried(), drop_solved(back=100), divide(by_failure)),
}


class Unread(Sequence[dict[str, Any]]):
    """Rows that are never read, as those of a set that is read as it is drawn."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> Any:
        raise IndexError(index)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    print(f"{options.prompts} prompts, {options.steps} steps of 512 prompts x 8 samples; milliseconds, the median")
    print(f"{'':24}{'select':>9}{'counts':>9}{'observe':>9}{'step':>9}{'bytes a prompt':>16}")
    for name, make in CURRICULA.items():
        curriculum = make(Unread(options.prompts), 0)
        state, random, times = curriculum.init(), np.random.default_rng(0), []
        assert curriculum.counts is not None
        for _ in range(options.steps):
            begin = time.perf_counter()
            ids, state = curriculum.select(state, 512)
            selected = time.perf_counter()
            samples = curriculum.counts(state, ids, 4096)
            counted = time.perf_counter()
            reward = (random.random(4096) < 0.5).astype(np.float32)
            batch: Any = SimpleNamespace(prompt_id=np.repeat(ids, samples), need=lambda name, reward=reward: reward)
            scored: Any = SimpleNamespace(batch=batch)
            resumed = time.perf_counter()
            state = curriculum.observe(state, Step(scored, [], {}))
            curriculum.metrics(state)
            times.append([selected - begin, counted - selected, time.perf_counter() - resumed])
        middle = 1000 * np.median(np.asarray(times), axis=0)
        size = sum(x.nbytes for x in state.values() if isinstance(x, np.ndarray)) / options.prompts
        print(f"{name:24}" + "".join(f"{x:9.1f}" for x in [*middle, middle.sum()]) + f"{size:16.1f}")


if __name__ == "__main__":
    main()
