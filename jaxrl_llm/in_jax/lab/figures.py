"""Figures of what a laboratory found, as SVG. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.in_jax.lab.outcome import Outcome
from jaxrl_llm.in_jax.lab.statistics import mean
from jaxrl_llm.in_jax.lab.tables import overall, summary_of
from jaxrl_llm.utils.errors import missing_package

MOST_CURVES = 8  # in one figure: more cannot be told apart


def chosen(outcomes: Sequence[Outcome], tasks: Sequence[str], baseline: str) -> list[str]:
    """The labels whose curves are drawn: all, or, of more than `MOST_CURVES`, the baseline, the best and the worst."""
    ranked = [label for label, _, _ in overall(outcomes, tasks, baseline)]
    if len(ranked) <= MOST_CURVES:
        return ranked
    others = [label for label in ranked if label != baseline]
    worst = (MOST_CURVES - 1) // 2
    first = [baseline] if baseline in ranked else []
    return first + others[: MOST_CURVES - worst - len(first)] + others[-worst:]


def write_curves(
    path: Path, outcomes: Sequence[Outcome], tasks: Sequence[str], best: dict[str, float], baseline: str
) -> None:
    """Reward over the iterations, a panel for each task: means over the seeds with 95 % intervals, and the best known.

    best: the best known reward by task.
    """
    figure = _figure((1.2 + 3.6 * len(tasks), 3.4))
    panels = np.atleast_1d(figure.subplots(1, len(tasks), sharey=True))
    labels = chosen(outcomes, tasks, baseline)
    for axes, task in zip(panels, tasks, strict=True):
        for number, label in enumerate(labels):
            outcome = next(o for o in outcomes if o.task == task and o.label == label)
            curve, colour = outcome.curves["reward"], f"C{number}"
            axes.plot(curve["iteration"], curve["mean"], color=colour, label=label, linewidth=1.5)
            axes.fill_between(curve["iteration"], curve["low"], curve["high"], color=colour, alpha=0.18, linewidth=0)
        axes.axhline(best[task], color="grey", linestyle=":", linewidth=1)
        axes.set(title=task, xlabel="iteration", ylim=(0, 1.05 * max(best.values())))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("reward of sampled completions")
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small")
    _save(figure, path)


def write_finals(path: Path, outcomes: Sequence[Outcome], tasks: Sequence[str], baseline: str) -> None:
    """Final reward of every method with its 95 % interval, a panel for each task, in the order of `overall`."""
    ranked = [label for label, _, _ in overall(outcomes, tasks, baseline)][::-1]
    figure = _figure((2.4 + 2.6 * len(tasks), 1.0 + 0.16 * len(ranked)))
    panels = np.atleast_1d(figure.subplots(1, len(tasks), sharey=True))
    for axes, task in zip(panels, tasks, strict=True):
        runs = {o.label: o.measures["final"] for o in outcomes if o.task == task and not o.error}
        found = [summary_of(mean, [runs[label]]) for label in ranked]
        values = np.array([each.value for each in found])
        reach = np.array([[max(0.0, each.value - each.low), max(0.0, each.high - each.value)] for each in found]).T
        places = np.arange(len(ranked))
        axes.errorbar(values, places, xerr=reach, fmt="o", markersize=3, linewidth=1, color="C0")
        if baseline in runs:
            axes.axvline(runs[baseline].mean(), color="C1", linewidth=1, linestyle="--")
        axes.set(title=task, xlabel="final reward", ylim=(-1, len(ranked)))
        axes.set_yticks(places, ranked, fontsize=6)
        axes.spines[["top", "right"]].set_visible(False)
    _save(figure, path)


def _figure(size: tuple[float, float]) -> Any:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_package("matplotlib", "run", "drawing the laboratory's figures") from error
    return Figure(figsize=size, layout="constrained")


def _save(figure: Any, path: Path) -> None:
    """The same numbers give the same file."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})
