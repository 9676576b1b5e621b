"""Draw the README's learning curves: python experiments/demo_curves.py runs/demo-seed*"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

from jaxrl_llm.reporting import read_jsonl


def main(folders: list[str], target: str = "experiments/results/demo.svg") -> None:
    """Reward of each step on the left, held-out accuracy with intervals on the right; prints docs/demo.md's table."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3), width_ratios=(2, 1), constrained_layout=True)
    for number, folder in enumerate(map(Path, folders)):
        steps = read_jsonl(folder / "metrics.jsonl")
        summary = json.loads((folder / "summary.json").read_text())
        seed = json.loads((folder / "config.json").read_text())["seed"]
        left.plot([s["step"] for s in steps], [s["reward/mean"] for s in steps], label=f"seed {seed}")
        tests = [summary["eval_before"], summary["eval_after"]]
        values = [100 * t["accuracy"] for t in tests]
        below = [v - 100 * t["low"] for v, t in zip(values, tests, strict=True)]
        above = [100 * t["high"] - v for v, t in zip(values, tests, strict=True)]
        right.errorbar([x + 0.06 * number for x in (0, 1)], values, yerr=[below, above], marker="o", capsize=3)
        before, after = (f"{100 * t['accuracy']:.1f} % ({100 * t['low']:.1f} to {100 * t['high']:.1f})" for t in tests)
        gain, entropy = values[1] - values[0], steps[-1]["entropy"]
        print(f"| {seed} | {before} | {after} | {gain:+.1f} | {entropy:.2f} |")
    left.set(xlabel="step", ylabel="reward of sampled answers", ylim=(0, None))
    left.legend(frameon=False)
    right.set(xticks=(0, 1), xticklabels=("before", "after"), ylabel="held-out accuracy, %", ylim=(0, None))
    right.set_xlim(-0.4, 1.5)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)


if __name__ == "__main__":
    main(sys.argv[1:])
