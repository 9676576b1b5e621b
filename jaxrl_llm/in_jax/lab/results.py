"""The folder of a laboratory: results.json, RESULTS.md, curves.svg and finals.svg. The figures need matplotlib."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.in_jax.lab.config import LabConfig
from jaxrl_llm.in_jax.lab.outcome import RunOutcome, from_json, overall, overall_table, summary_of, task_table, to_json
from jaxrl_llm.in_jax.lab.statistics import mean
from jaxrl_llm.in_jax.settings import LabSettings
from jaxrl_llm.reporting.logging.files import read_json
from jaxrl_llm.utils.errors import InputError, optional_package, several, shown
from jaxrl_llm.utils.storage import replace_file

MOST_CURVES = 8  # in one figure: more cannot be told apart
Start = dict[str, Any]  # "rewards" by name, "best", "threshold", "steps"
ABOUT = """\
What this can tell: whether a method learns at all from a sparse, delayed or wrong reward, how fast, and how evenly over
seeds, in {iterations} iterations of a decoder with {layers} layers of width {hidden}, with the method's own defaults.

What it cannot tell: how methods rank on language models. Vocabulary and answers are tiny. One learning rate is used for
all methods, and many would like another. Seeds share one start, and the same seed draws the same prompts for every
method, so that intervals are of sampling only. Methods that differ only off-policy coincide where a batch is one
gradient step. Intervals are 95 % percentile bootstraps over {seeds} seeds, and somewhat too narrow where these are few.
Methods whose intervals overlap are not told apart, and of many methods some stand out by chance.

Columns: the final reward is that of 1,024 completions of fresh prompts after the last iteration. Area: the mean reward
over the iterations. Steps: the median over the seeds of the iterations until the mean reward of {window} of them was at
the threshold. Collapsed: runs whose last {window} iterations earn less than half of their best {window}. P(better than
...): the probability that a run of the method ends higher than one of the baseline; at 0.5 neither is better. Seconds:
of all seeds together, and of all points of the grid where they are one program."""


def read_results(folder: Path, config: LabConfig) -> tuple[dict[str, Start], list[RunOutcome]]:
    """The starts of tasks and the outcomes that the folder holds; InputError where they are of other settings."""
    value = read_json(folder / "results.json")
    if not value:
        return {}, []
    try:
        theirs, ours = {"first_seed": 0, **value["settings"]}, config.in_common()
        theirs["settings"] = asdict(LabSettings()) | theirs["settings"]  # older folders lack newer settings
        outcomes = [from_json(one) for one in value["outcomes"]]
        starts = dict(value["starts"])
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"{folder / 'results.json'} was not written by jaxrl lab: choose another --output") from None
    for name in ours:
        if theirs.get(name) != ours[name]:
            change = f"{shown(theirs.get(name))}, and not {shown(ours[name])}"
            raise InputError(f"{folder} holds results with {name} {change}: choose another --output")
    return starts, outcomes


def write_results(folder: Path, config: LabConfig, starts: Mapping[str, Start], outcomes: Sequence[RunOutcome]) -> None:
    """Write all files of the folder anew; each is replaced as a whole."""
    tasks = [name for name in starts if any(o.task == name for o in outcomes)]
    baseline = next((o.label for o in outcomes if o.method == config.compared_with), config.compared_with)
    value = {"settings": config.in_common(), "starts": starts, "outcomes": [to_json(o) for o in outcomes]}
    replace_file(folder / "results.json", json.dumps(value, allow_nan=False) + "\n")
    replace_file(folder / "RESULTS.md", as_markdown(config, starts, outcomes, tasks, baseline))
    if any(not o.error for o in outcomes):
        write_curves(folder / "curves.svg", outcomes, tasks, {name: starts[name]["best"] for name in tasks}, baseline)
        write_finals(folder / "finals.svg", outcomes, tasks, baseline)


def as_markdown(
    config: LabConfig, starts: Mapping[str, Start], outcomes: Sequence[RunOutcome], tasks: Sequence[str], baseline: str
) -> str:
    """The results as a page: what was run, a table over all tasks, one for each, and what they can tell."""
    s = config.settings
    seeds = f"{config.seeds} seeds" + (f" from {config.first_seed} on" if config.first_seed else "")
    parts = [
        "# Laboratory",
        f"{seeds}, {s.iterations} iterations of {s.prompts} prompts x {s.group_size} completions, Adam "
        f"with learning rate {s.learning_rate:g}, {several(s.epochs * s.minibatches, 'gradient step')} for each batch.",
        "![Reward over the iterations](curves.svg)",
        "![Final rewards](finals.svg)",
    ]
    if len(tasks) > 1:
        parts += ["## All tasks", overall_table(outcomes, tasks, baseline)]
    for name in tasks:
        own = [o for o in outcomes if o.task == name]
        own.sort(key=lambda o: -mean([o.measures["final"]]) if not o.error else 1.0)
        parts += [f"## {name}", start_line(name, starts[name]), task_table(own, baseline, starts[name]["threshold"])]
        if same := coinciding(own):
            parts.append("The same in all runs: " + "; ".join(" = ".join(labels) for labels in same) + ".")
    about = ABOUT.format(**asdict(s), seeds=config.seeds, window=config.window)
    return "\n\n".join([*parts, "## How to read this", about]) + "\n"


def coinciding(outcomes: Sequence[RunOutcome]) -> list[list[str]]:
    """The labels of outcomes of one task that earned the same rewards all along, where there are several."""
    found: dict[str, list[str]] = {}
    for outcome in outcomes:
        if not outcome.error:
            rewards = outcome.measures["final"].tolist(), outcome.curves["reward"]  # entropies differ by rounding
            found.setdefault(json.dumps(rewards), []).append(outcome.label)
    return [labels for labels in found.values() if len(labels) > 1]


def start_line(task: str, start: Start) -> str:
    """A task before reinforcement learning, in a line."""
    rewards = ", ".join(f"{name} {value:.3f}" for name, value in start["rewards"].items())
    return f"{task}: after {start['steps']} supervised steps {rewards}; the best known reward is {start['best']:g}."


def outcome_line(outcome: RunOutcome) -> str:
    """An outcome in a line."""
    if outcome.error:
        return f"{outcome.task} {outcome.label}: {outcome.error}"
    seconds = outcome.seconds
    return (
        f"{outcome.task} {outcome.label}: final reward {summary_of(mean, [outcome.measures['final']])}, "
        f"compiled in {seconds['compile']:.0f} s, ran {seconds['run']:.0f} s"
    )


def chosen(outcomes: Sequence[RunOutcome], tasks: Sequence[str], baseline: str) -> list[str]:
    """The labels whose curves are drawn: all, or, of more than `MOST_CURVES`, the baseline, the best and the worst."""
    ranked = [label for label, _, _ in overall(outcomes, tasks, baseline)]
    if len(ranked) <= MOST_CURVES:
        return ranked
    others = [label for label in ranked if label != baseline]
    worst = (MOST_CURVES - 1) // 2
    first = [baseline] if baseline in ranked else []
    return first + others[: MOST_CURVES - worst - len(first)] + others[-worst:]


def write_curves(
    path: Path, outcomes: Sequence[RunOutcome], tasks: Sequence[str], best: dict[str, float], baseline: str
) -> None:
    """Reward over the iterations, a panel for each task: means over the seeds with 95 % intervals, and the best known.

    best: the best known reward by task.
    """
    figure, panels = _figure((1.2 + 3.6 * len(tasks), 3.4), tasks)
    labels = chosen(outcomes, tasks, baseline)
    for axes, task in zip(panels, tasks, strict=True):
        for number, label in enumerate(labels):
            outcome = next(o for o in outcomes if o.task == task and o.label == label)
            curve = outcome.curves["reward"]
            colour = f"C{number}"
            axes.plot(curve["iteration"], curve["mean"], color=colour, label=label, linewidth=1.5)
            axes.fill_between(curve["iteration"], curve["low"], curve["high"], color=colour, alpha=0.18, linewidth=0)
        axes.axhline(best[task], color="grey", linestyle=":", linewidth=1)
        axes.set(title=task, xlabel="iteration", ylim=(0, 1.05 * max(best.values())))
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("reward of sampled completions")
    panels[-1].legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, fontsize="small")
    _save(figure, path)


def write_finals(path: Path, outcomes: Sequence[RunOutcome], tasks: Sequence[str], baseline: str) -> None:
    """Final reward of every method with its 95 % interval, a panel for each task, in the order of `overall`."""
    ranked = [label for label, _, _ in overall(outcomes, tasks, baseline)][::-1]
    figure, panels = _figure((2.4 + 2.6 * len(tasks), 1.0 + 0.16 * len(ranked)), tasks)
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


def _figure(size: tuple[float, float], tasks: Sequence[str]) -> tuple[Any, Any]:
    """A figure, and its panel for each task."""
    with optional_package("matplotlib", "run", "drawing the laboratory's figures"):
        from matplotlib.figure import Figure
    figure = Figure(figsize=size, layout="constrained")
    return figure, np.atleast_1d(figure.subplots(1, len(tasks), sharey=True))


def _save(figure: Any, path: Path) -> None:
    """The same numbers give the same file."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": path.name}):
        figure.savefig(path, metadata={"Date": None})
