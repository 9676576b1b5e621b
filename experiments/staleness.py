"""Held-out accuracy by the bound on staleness: python experiments/staleness.py --bounds 0 1 4 --seeds 0 1 2

The demo's runs (`jaxrl demo`), with as many samples each. Prints a line for each run as it ends, then the means over
seeds. Runs that are there already, in the folder of --output, are not run again.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.cli.demo import dapo_with_entropy_bonus, demo_config, easy_first
from jaxrl_llm.reporting import read_jsonl
from jaxrl_llm.training.loop import train


def figures(folder: Path, config: Any) -> dict[str, float]:
    """Figures of a run, which is run if it is not there."""
    if not (folder / "summary.json").exists() or "eval_after" not in json.loads((folder / "summary.json").read_text()):
        draws = int(1.5 * config.steps * config.prompts_per_step)
        curriculum = partial(easy_first, draws=draws, seed=config.seed)
        train(config, algorithm=dapo_with_entropy_bonus, curriculum=curriculum)
    summary, lines = json.loads((folder / "summary.json").read_text()), read_jsonl(folder / "metrics.jsonl")

    def mean(name: str) -> float:
        return float(np.mean([line.get(name, 0.0) for line in lines]))

    return {
        "before": 100 * summary["eval_before"]["accuracy"], "after": 100 * summary["eval_after"]["accuracy"],
        "staleness": mean("rollout/staleness"), "entropy": lines[-1]["entropy"], "update": mean("seconds/update"),
    }  # fmt: skip


def main() -> None:
    """Run all bounds, seeds and corrections, and print their figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--corrections", nargs="+", default=["truncate"], choices=("truncate", "mask", "interpolate", "none")
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--output", type=Path, default=Path("runs/staleness"))
    given = parser.parse_args()
    lines = []
    for seed in given.seeds:
        for bound in given.bounds:
            for correction in given.corrections if bound else given.corrections[:1]:
                folder = given.output / f"{bound}-{correction if bound else 'none'}-{seed}"
                config = demo_config(given.model, seed, str(folder), given.steps)
                config = dataclasses.replace(config, eval_size=256, max_staleness=bound)
                if bound:
                    config = dataclasses.replace(config, stale_correction=correction)
                found = figures(folder, config)
                lines.append(((bound, correction if bound else "none"), found))
                said = "  ".join(f"{name} {value:.2f}" for name, value in found.items())
                print(
                    f"RESULT seed {seed}, staleness at most {bound}, {correction if bound else 'none'}: {said}",
                    flush=True,
                )
    print("\n| max staleness | correction | before | after, mean | each | mean staleness |\n|---|---|---|---|---|---|")
    for kind in dict.fromkeys(one for one, _ in lines):
        runs = [found for one, found in lines if one == kind]
        before, after, age = (np.mean([run[name] for run in runs]) for name in ("before", "after", "staleness"))
        each = ", ".join(f"{run['after']:.1f}" for run in runs)
        print(f"| {kind[0]} | {kind[1]} | {before:.1f} | {after:.1f} | {each} | {age:.2f} |")


if __name__ == "__main__":
    main()
