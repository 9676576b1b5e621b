"""What `jaxrl demo` runs: DAPO on SmolLM2-135M-Instruct, sums of two numbers, verifiable answers.

The task is reasoning-gym's basic_arithmetic with two terms of one or two digits, both of as many, and the question as
reasoning-gym words it. The verifier is `number_match`: the last number of the completion must be the answer. None of
the 128 held-out questions is a training question; few of them have one-digit numbers (there are 100 such questions in
all), with which the curriculum begins. DAPO is GRPO without a KL reference and with dynamic sampling: groups whose
completions are all right or all wrong teach nothing and are replaced by groups of other prompts. An entropy bonus keeps
the sampled answers varied.
"""

import dataclasses
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.algorithms import dapo
from jaxrl_llm.core.algorithm import Algorithm
from jaxrl_llm.core.source import Curriculum
from jaxrl_llm.objectives import entropy
from jaxrl_llm.training.config import Dtype, OptimizerConfig, TrainConfig
from jaxrl_llm.training.loop import train
from jaxrl_llm.training.notes import accuracy_line

ROUNDS = 2  # of sampling in a step, at most
ENTROPY = 0.01  # coefficient of the bonus
KINDS = {
    "wrong, then right": (0, 1),
    "still wrong": (0, 0),
    "right, then wrong": (1, 0),
    "right before and after": (1, 1),
}


def demo_config(model: str, seed: int, output: str, steps: int, dtype: Dtype = "float32") -> TrainConfig:
    """The demo's settings."""
    return TrainConfig(
        model=model,
        dtype=dtype,
        output=output,
        seed=seed,
        steps=steps,
        prompts="reasoning-gym:basic_arithmetic",
        task_options={
            "operators": "['+']",
            "max_terms": "2",
            "max_digits": "2",
            "allow_negation": "false",
            "allow_parentheses": "false",
        },
        rewards=("number_match",),
        prompts_per_step=8,
        group_size=8,
        max_new_tokens=16,
        temperature=1.0,
        hyperparameters={"rounds": ROUNDS},
        minibatches=2,
        remat=False,
        optimizer=OptimizerConfig(learning_rate=3e-5, warmup_steps=4),
        eval_size=128,
        checkpoint_every=0,
        log_completions_every=5,
    )


def dapo_with_entropy_bonus(rounds: int) -> Algorithm:
    """DAPO with ENTROPY times the mean entropy of the policy subtracted from its loss."""
    algorithm = dapo(rounds=rounds)
    return dataclasses.replace(algorithm, objective=algorithm.objective - ENTROPY * entropy())


def easy_first(rows: list[dict[str, Any]], draws: int, seed: int) -> Curriculum:
    """One-digit numbers first, then more and more two-digit ones, three of four at the end.

    draws: prompts until the end; the order repeats after them. The state is the number of prompts taken.
    """
    random = np.random.default_rng(seed)
    digits = np.array([row["reasoning_gym_entry"]["metadata"]["num_digits"] for row in rows])
    hard = np.diff(np.floor(np.cumsum(np.linspace(0, 0.75, draws))), prepend=0) > 0
    order = np.zeros(draws, np.int32)
    for level, places in ((1, ~hard), (2, hard)):
        order[places] = np.resize(random.permutation(np.flatnonzero(digits == level)), places.sum())

    def following(at: int, count: int) -> tuple[np.ndarray, int]:
        return order.take(range(at, at + count), mode="wrap"), at + count

    return Curriculum(lambda: 0, following, lambda at, step: at)


def examples(folder: Path, count: int = 3) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(kind, before, after) for some held-out questions: the first of each kind, then others."""
    lines = [json.loads(line) for line in (folder / "completions.jsonl").read_text().splitlines()]
    lines.sort(key=lambda line: line["prompt_id"])
    of_phase = ([line for line in lines if line["phase"] == phase] for phase in ("eval_before", "eval_after"))
    pairs = list(zip(*of_phase, strict=True))
    by_kind = [
        [(name, before, after) for before, after in pairs if (before["reward"], after["reward"]) == kind]
        for name, kind in KINDS.items()
    ]
    return ([some[0] for some in by_kind if some] + [one for some in by_kind for one in some[1:]])[:count]


def run(model: str, seed: int, output: str, steps: int, dtype: Dtype = "float32") -> dict[str, Any]:
    """Train, then print the two accuracies and three completions before and after. Returns the run's summary."""
    begun = time.monotonic()
    config = demo_config(model, seed, output, steps, dtype)
    draws = int(1.5 * config.steps * config.prompts_per_step)  # about as many as dynamic sampling takes
    curriculum = partial(easy_first, draws=draws, seed=config.seed)
    summary = train(config, algorithm=dapo_with_entropy_bonus, curriculum=curriculum)
    print_summary(summary, Path(output), str, f"{(time.monotonic() - begun) / 60:.1f} minutes")
    return summary


def print_summary(summary: dict[str, Any], folder: Path, question: Callable[[Any], str], took: str) -> None:
    """Print examples, the two accuracies, and how long the run took. question: of a prompt."""
    for kind, before, after in examples(folder):
        print(f"\n{question(before['prompt'])}  ({kind})")
        for name, line in (("before", before), ("after", after)):
            print(f"  {name:7}{'right' if line['reward'] == 1 else 'wrong'}  {''.join(line['tokens'])!r}")
    print(f"\nbefore  {accuracy_line(summary['eval_before'])}")
    print(f"after   {accuracy_line(summary['eval_after'])}")
    gain = 100 * (summary["eval_after"]["accuracy"] - summary["eval_before"]["accuracy"])
    print(f"gain    {gain:+.1f} percentage points in {took}")
    print(f"report  {folder / 'report.html'}")
