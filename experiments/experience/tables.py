"""The table and the figure of the results."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from experiments.experience.compare import Results, difference, mean_and_error

ENOUGH = 3.0  # standard errors
HEAD = ["| | method | final score | mean of the curve | difference in standard errors | sampled tokens | steps |",
        "|---|---|---|---|---|---|---|"]  # fmt: skip


def rows_of(family: dict[str, Any]) -> list[str]:
    """The lines of a family: GRPO, then the methods, by their difference from it."""
    base, *others = family["runs"]
    gaps = {run["method"]: difference(run["finals"], base["finals"]) for run in others}
    lines = []
    for run in [base, *sorted(others, key=lambda run: -gaps[run["method"]])]:
        final, area = (mean_and_error(run[name]) for name in ("finals", "areas"))
        gap = gaps.get(run["method"])
        shown = "" if gap is None else "never" if math.isinf(gap) else f"{gap:+.1f}"
        lines.append(
            f"| {family['key'] if run is base else ''} | {run['method']} | {final[0]:.3f} ± {final[1]:.3f} | "
            f"{area[0]:.3f} ± {area[1]:.3f} | {shown} | {np.mean(run['tokens']):,.0f} | {np.mean(run['steps']):.0f} |"
        )
    return lines


def helped(results: Results) -> list[str]:
    """The methods that end at least ENOUGH standard errors above GRPO."""
    return [run["method"] for family in results["families"] for run in family["runs"][1:]
            if difference(run["finals"], family["runs"][0]["finals"]) >= ENOUGH]  # fmt: skip


def table(results: Results) -> str:
    """The table in Markdown, then the tasks, then the methods that did not help."""
    lines = list(HEAD)
    for family in results["families"]:
        lines += rows_of(family)
    lines += [""]
    for family in results["families"]:
        about = family["about"]
        lines.append(
            f"- **{family['key']}, {family['title']}.** {family['text']} {about['rows']} prompts, steps of "
            f"{about['step']} x {about['group']} completions of at most {about['length']} tokens, learning rate "
            f"{about['rate']:g}."
        )
    without = [
        f"- `{run['method']}`: {run['why']}"
        for family in results["families"]
        for run in family["runs"][1:]
        if difference(run["finals"], family["runs"][0]["finals"]) < ENOUGH
    ]
    if without:
        lines += ["", f"Less than {ENOUGH:g} standard errors above GRPO, or below it:", "", *without]
    return "\n".join(lines)


def draw(results: Results, path: Path) -> None:
    """The mean score of every method over the sampled tokens, a panel a family."""
    from matplotlib.figure import Figure

    families = results["families"]
    wide = min(3, len(families))
    high = -(-len(families) // wide)
    figure = Figure(figsize=(4 * wide, 2.7 * high), layout="constrained")
    for place, family in enumerate(families, start=1):
        axes = figure.add_subplot(high, wide, place)
        for run in family["runs"]:
            points = np.linspace(0, family["about"]["tokens"] / 1000, len(run["curves"]))
            name = run["method"].partition(" ")[0]
            axes.plot(points, run["curves"], linewidth=1.5, label=name, **({"color": "0.5"} if name == "grpo" else {}))
        axes.set_title(f"{family['key']}: {family['title']}", fontsize=9)
        axes.set_xlabel("sampled tokens, thousands", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.2)
        axes.legend(fontsize=7, frameon=False)
    figure.savefig(path, metadata={"Date": None})
