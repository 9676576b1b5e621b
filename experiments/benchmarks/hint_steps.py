"""Decode steps of a step with hints: python experiments/benchmarks/hint_steps.py --model FOLDER

A share of the groups fails and is tried again with a hint, against the same groups without a retry. Lengths have the
long tail of `rollout_tail`: the quantiles of a log-normal distribution, shuffled; those of the retries are drawn from
them. The model only fills slots, so any will do; counts depend on neither its weights nor the machine.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from rollout_tail import tail_limits

from jaxrl_llm.core.rollout import Rollout, Task
from jaxrl_llm.data.prompt_set import PromptSet
from jaxrl_llm.models import load_policy
from jaxrl_llm.models.policy import Params, Policy
from jaxrl_llm.rewards.workers.runner import Reward
from jaxrl_llm.rollouts.context import Tools
from jaxrl_llm.rollouts.episode import Episode
from jaxrl_llm.rollouts.guidance.hints import from_column
from jaxrl_llm.rollouts.guidance.repair import retried, succeeds
from jaxrl_llm.rollouts.runtime.source import experience
from jaxrl_llm.rollouts.runtime.source_setup import Experience
from jaxrl_llm.rollouts.runtime.sources import shuffled_epochs
from jaxrl_llm.sampling.sampler import SamplingConfig
from jaxrl_llm.sampling.stats import Stats


class Uneven:
    """Tools whose samples have the lengths that `limits` says, by their numbers."""

    def __init__(self, tools: Tools, limits: Sequence[int]) -> None:
        self._tools, self._limits = tools, limits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tools, name)

    async def sample(self, prompt: Sequence[int], *, number: int) -> Episode:
        return await self._tools.sample(prompt, number=number, limit=self._limits[number])


def decode_steps(
    policy: Policy, params: Params, share: float, *, groups: int, samples: int, median: float, longest: float,
    slots: int, seed: int,
) -> int:  # fmt: skip
    """Decode steps of one step of `groups` groups, of which this share is tried again with a hint.

    slots: 0, or rows that are decoded at once. The policy must have no end tokens.
    """
    random = np.random.default_rng(seed)
    lengths = np.reshape(tail_limits(groups * samples, median, longest, seed), (groups, samples))
    again = random.choice(lengths.ravel(), (groups, samples))
    failing = random.permutation(groups)[: round(share * groups)]
    hints = retried(from_column(), succeeds())

    async def program(tools: Any, task: Task) -> Sequence[Episode]:
        limits: Any = [*lengths[task.prompt_id].tolist(), *again[task.prompt_id].tolist()]
        uneven: Any = Uneven(tools, limits)
        return await hints.program(uneven, task)

    def reward(completions: Sequence[str], fails: Sequence[bool]) -> list[float]:
        return [float(not one) for one in fails]

    rows = [{"prompt": "p", "hint": "think", "fails": i in failing} for i in range(groups)]
    prompts = PromptSet(rows, [[1 + (i + k) % 200 for k in range(24)] for i in range(groups)])
    stats = list[Stats]()
    setup = Experience(
        policy, prompts, [Reward(reward)], shuffled_epochs(rows, seed),
        SamplingConfig(max_new_tokens=int(lengths.max()), slots=slots), Rollout(program, columns=("hint",)),
        prompts_per_step=groups, group_size=samples, watch=stats.append,
    )  # fmt: skip
    source = experience(setup)
    found, _ = source.next(source.init(), params, jax.random.key(seed), 0)
    assert found.scored.batch.info is not None
    np.testing.assert_allclose(np.mean(found.scored.batch.info["guided"]), len(failing) / groups)
    return sum(one.steps for one in stats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tests/vectors/llama_tied")
    parser.add_argument("--groups", type=int, default=20)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--median", type=float, default=24)
    parser.add_argument("--longest", type=float, default=16, help="times the median")
    parser.add_argument("--slots", type=int, nargs="+", default=[0, 80, 40])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--share", type=float, default=0.2)
    given = parser.parse_args()
    policy, params, _ = load_policy(given.model)
    policy = replace(policy, config=replace(policy.config, max_positions=8192, eos_token_ids=()))
    lengths: dict[str, Any] = {name: getattr(given, name) for name in ("groups", "samples", "median", "longest")}
    print(f"{given.groups} groups of {given.samples}, {given.share:.0%} tried again; {given.seeds} seeds")
    print("| slots | decode steps, none tried again | with retries | ratio: mean (range) |\n|---|---|---|---|")
    for slots in given.slots:
        steps = [
            [decode_steps(policy, params, share, slots=slots, seed=seed, **lengths) for share in (0.0, given.share)]
            for seed in range(given.seeds)
        ]
        ratios = [some / none for none, some in steps]
        none, some = (statistics.mean(column) for column in zip(*steps, strict=True))
        spread = f"{statistics.mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
        print(f"| {slots or 'all'} | {none:,.0f} | {some:,.0f} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
