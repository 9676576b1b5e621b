"""What a text gains that the policy optimises itself: methods of `jaxrl_llm.texts` with SmolLM2-135M, over seeds.

    python -m experiments.texts --output /tmp/texts

The task is sums of two one-digit numbers, in the wording of reasoning-gym; the last number of an answer must be right.
All methods begin with "Answer the question.". A run is `jaxrl texts` with its own seed of training prompts and samples;
the policy is proposer, judge and source of examples. The table has the greedy accuracy on the same held-out prompts,
one answer each, with the first text and with the optimised one: the mean of the differences over seeds, and its
standard error. Runs that are there already are read and not repeated; one that was killed goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm import TrainConfig
from jaxrl_llm.texts import optimise
from jaxrl_llm.utils.process import use_compile_cache

TEXT = "Answer the question."
# Name in the table -> method, its hyper-parameters, steps.
RUNS: dict[str, tuple[str, dict[str, Any], int]] = {
    "training_free_grpo, lessons as examples": ("training_free_grpo", {"lessons": "examples", "most": 3}, 4),
    "polca, both kinds of proposals": ("polca", {"by": "both", "shots": 2}, 3),
    "contextevolve": ("contextevolve", {"shots": 2}, 3),
    "spo_prompt, both kinds of proposals": ("spo_prompt", {"by": "both", "shots": 2, "votes": 2}, 3),
    "training_free_grpo, lessons in words": ("training_free_grpo", {"lessons": "words", "summarise": False}, 4),
}


def config_of(name: str, seed: int, folder: Path) -> TrainConfig:
    """The settings of a run."""
    method, hyperparameters, steps = RUNS[name]
    return TrainConfig(
        model="smollm2-135m", output=str(folder), seed=seed, algorithm=method, hyperparameters=hyperparameters,
        steps=steps, prompts="reasoning-gym:basic_arithmetic", num_prompts=128, rewards=("number_match",),
        task_options={"operators": "['+']", "max_terms": "2", "max_digits": "1", "allow_negation": "false",
                      "allow_parentheses": "false"},
        prompts_per_step=4, group_size=4, max_new_tokens=16, stop=("\n",), eval_size=32, tensorboard=False,
    )  # fmt: skip


def result(name: str, seed: int, output: Path) -> dict[str, Any]:
    """The summary of a run, which is made where it is not there yet, with its seconds."""
    folder = output / f"{list(RUNS).index(name)}-{seed}"
    seconds = folder.with_suffix(".seconds")
    if not seconds.exists():
        begin = time.perf_counter()
        resumed = (folder / "state.json").exists()
        optimise(config_of(name, seed, folder), TEXT, reply_tokens=24, resume=resumed)
        seconds.write_text(f"{time.perf_counter() - begin:.0f}")
    found: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return {**found, "seconds": float(seconds.read_text())}


def table(output: Path, seeds: int) -> str:
    """The results of the runs that have ended, as a table."""
    rows = [
        "| method | before | after | gain | standard error | gain / error | answers | replies | seconds |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for place, name in enumerate(RUNS):
        done = [seed for seed in range(seeds) if (output / f"{place}-{seed}.seconds").exists()]
        found = [result(name, seed, output) for seed in done]
        if len(found) < 2:
            continue
        before, after = (np.array([one[key]["accuracy"] for one in found]) for key in ("eval_before", "eval_after"))
        gain, error = (after - before).mean(), (after - before).std(ddof=1) / len(found) ** 0.5
        spent = [np.mean([one["counts"].get(f"samples/{key}", 0) for one in found]) for key in ("answers", "replies")]
        rows.append(
            f"| {name} | {before.mean():.1%} | {after.mean():.1%} | {gain:+.1%} | {error:.1%} | "
            f"{gain / error if error else float('inf'):.1f} | {spent[0]:.0f} | {spent[1]:.0f} | "
            f"{np.mean([one['seconds'] for one in found]):.0f} |"
        )
    return "\n".join(rows)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--output", type=Path, required=True, help="a folder, whose runs are kept")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--only", type=int, nargs="+", default=range(len(RUNS)), help="places in RUNS, from 0")
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    use_compile_cache()
    for seed in range(options.seeds):
        for name in (list(RUNS)[place] for place in options.only):
            print(f"{name}, seed {seed}", flush=True)
            result(name, seed, options.output)
    print(table(options.output, options.seeds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
