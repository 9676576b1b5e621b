"""Steps for curricula without a model: prompts that are solved with given probabilities."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np

from jaxrl_llm.algorithms.prompts.dots_rr import attention, reference_groups
from jaxrl_llm.core.source import Curriculum, MakeCurriculum, Step
from jaxrl_llm.curriculum.rules import RuleOf
from jaxrl_llm.curriculum.scores import near_target

Rates = Callable[[int, int], float]  # (prompt, step) -> success rate


def rows_of(count: int, **columns: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"prompt": f"prompt {i}", **{name: of[i] for name, of in columns.items()}} for i in range(count)]


def step_of(prompt_id: Any, reward: Any) -> Step:
    """What a curriculum reads of a step."""
    reward = np.asarray(reward, np.float32)
    batch: Any = SimpleNamespace(prompt_id=np.asarray(prompt_id, np.int32), reward=reward, need=lambda name: reward)
    return Step(SimpleNamespace(batch=batch), [], {})  # type: ignore[arg-type]


def results(ids: Any, samples: Any, rate: Callable[[int], float], seed: int, named: Any = None) -> Step:
    """A step in which each prompt has samples of its success rate; `named` is its stable number."""
    named = range(10**9) if named is None else named
    prompts, rewards = [], []
    for place, (i, n) in enumerate(zip(ids, samples, strict=True)):
        drawn = np.random.default_rng([seed, place, int(named[int(i)])]).random(int(n))
        prompts += [int(i)] * int(n)
        rewards += (drawn < rate(int(named[int(i)]))).tolist()
    return step_of(prompts, rewards)


def near_predicted(
    references: int = 256, every: int = 2, temperature: float = 1e-3, **options: Any
) -> tuple[RuleOf, RuleOf]:
    """The rules of `dots_rr`, with small networks."""
    options = {"units": 8, "layers": 1, "passes": 4} | options
    return reference_groups(references, every), near_target(0.5, temperature, attention(references, every, **options))


class Ran:
    """Steps of a curriculum on prompts that are solved with probability rate(number, step)."""

    def __init__(
        self, make: MakeCurriculum, rows: list[dict[str, Any]], rate: Rates, steps: int, *, prompts: int = 4,
        group: int = 8, seed: int = 0, state: Any = None, begin: int = 0,
    ) -> None:  # fmt: skip
        self.curriculum: Curriculum = make(rows, seed)
        self.state = self.curriculum.init() if state is None else state
        self.ids: list[list[int]] = []
        self.counts: list[list[int]] = []
        named = [int(str(row["prompt"]).split()[1]) for row in rows]
        for step in range(begin, begin + steps):
            ids, self.state = self.curriculum.select(self.state, prompts)
            samples = np.full(len(ids), group)
            if self.curriculum.counts is not None:
                samples = self.curriculum.counts(self.state, ids, prompts * group)
                assert samples.sum() == prompts * group
                assert samples.min() >= 1
            self.ids.append([named[i] for i in ids])
            self.counts.append(samples.tolist())
            at = step
            self.state = self.curriculum.observe(
                self.state, results(ids, samples, lambda i, at=at: rate(i, at), step, named)
            )

    @property
    def metrics(self) -> dict[str, float]:
        return self.curriculum.metrics(self.state)
