"""The table and the figure of the results."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from experiments.experience.compare import Results, difference, mean_and_error

ENOUGH = 3.0  # standard errors
HEAD = ["| | method | score at the end | difference | mean of the curve | difference | sampled tokens | steps |",
        "|---|---|---|---|---|---|---|---|"]  # fmt: skip


def gaps(run: dict[str, Any], base: dict[str, Any]) -> tuple[float, float]:
    """How far a method ends above GRPO, and how far the mean of its curve is above GRPO's, in standard errors."""
    return difference(run["finals"], base["finals"]), difference(run["areas"], base["areas"])


def rows_of(family: dict[str, Any]) -> list[str]:
    """The lines of a family: GRPO, then the methods, by their difference from it at the end."""
    base, *others = family["runs"]
    lines = []
    for run in [base, *sorted(others, key=lambda run: -gaps(run, base)[0])]:
        final, area = ("{:.3f} ± {:.3f}".format(*mean_and_error(run[name])) for name in ("finals", "areas"))
        shown = ["", ""] if run is base else ["∞" if math.isinf(gap) else f"{gap:+.1f}" for gap in gaps(run, base)]
        first, tokens, steps = family["key"] if run is base else "", np.mean(run["tokens"]), np.mean(run["steps"])
        cells = [first, run["method"], final, shown[0], area, shown[1], f"{tokens:,.0f}", f"{steps:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def helped(results: Results, which: int = 0) -> list[str]:
    """The methods at least ENOUGH standard errors above GRPO: at the end (0), or in the mean of the curve (1)."""
    return [run["method"] for family in results["families"] for run in family["runs"][1:]
            if gaps(run, family["runs"][0])[which] >= ENOUGH]  # fmt: skip


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
        if gaps(run, family["runs"][0])[0] < ENOUGH
    ]
    if without:
        lines += ["", f"Less than {ENOUGH:g} standard errors above GRPO at the end:", "", *without]
    return "\n".join(lines)


def draw(results: Results, path: Path) -> None:
    """The mean score of every method over the sampled tokens, a panel a family."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    families = results["families"]
    wide = min(3, len(families))
    high = -(-len(families) // wide)
    figure = Figure(figsize=(4 * wide, 2.7 * high), layout="constrained")
    for place, family in enumerate(families, start=1):
        axes = figure.add_subplot(high, wide, place)
        names = [run["method"].partition(" ")[0] for run in family["runs"]]
        for number, (name, run) in enumerate(zip(names, family["runs"], strict=True)):
            points = np.linspace(0, family["about"]["tokens"] / 1000, len(run["curves"]))
            label = name if names.count(name) == 1 else run["method"].replace("kl_coefficient", "KL")
            axes.plot(points, run["curves"], linewidth=1.5, label=label, **({} if number else {"color": "0.5"}))
        axes.set_title(f"{family['key']}: {family['title']}", fontsize=9)
        axes.set_xlabel("sampled tokens, thousands", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.grid(alpha=0.2)
        axes.legend(fontsize=7, frameon=False)
    with rc_context({"svg.hashsalt": "experience"}):  # so that a figure of the same results is the same file
        figure.savefig(path, metadata={"Date": None})
