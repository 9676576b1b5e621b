"""The outcome of a method on a task at one point of the grid: numbers of each seed, and curves with intervals; tables
of outcomes as Markdown, one for each task and one over all of them."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.in_jax.lab.config import Point
from jaxrl_llm.in_jax.lab.statistics import (
    Floats,
    Strata,
    area,
    bootstrap,
    collapsed,
    interquartile_mean,
    mean,
    probability_of_improvement,
    steps_to,
    trailing_mean,
)
from jaxrl_llm.in_jax.tasks import Task
from jaxrl_llm.reporting.statistics import pass_at_k

CURVES = ("reward", "entropy", "length")  # metrics whose curves are kept
LONGEST_CURVE = 40  # points; single batches are mostly noise


class Measuring(NamedTuple):
    """How runs on a task are measured."""

    task: Task
    threshold: float  # reward to reach
    window: int  # iterations whose mean reward counts as reached, or as the end of a run


class RunOutcome(NamedTuple):
    """The outcome of one method on one task at one point of the grid."""

    task: str
    method: str
    point: Point
    measures: dict[str, Floats]
    """f64[seeds] each: "final" (reward of fresh prompts at the end), "pass@1" ..., "entropy" and "length" at the end,
    "area", "steps" (iterations to the threshold, infinite where it was not reached), "collapsed" (0 or 1)."""
    curves: dict[str, dict[str, list[float]]]
    """By metric: "iteration", and there "mean", "low" and "high", a 95 % interval over the seeds."""
    seconds: dict[str, float]
    """"compile" and "run"; of all points of the grid together where they are one program."""
    note: str = ""
    """What the method goes without."""
    error: str = ""
    """Why there is no result."""

    @property
    def label(self) -> str:
        """The method, and where it is on the grid."""
        return " ".join([self.method, *(f"{name}={value:g}" for name, value in self.point.items())])


def measure(metrics: Mapping[str, Floats], rewards: Floats, right: Floats, how: Measuring) -> dict[str, Floats]:
    """The measures of runs, see `RunOutcome`.

    metrics: f64[seeds, iterations] by name. rewards, right: f64[seeds, prompts, samples], rewards and 0 or 1, of fresh
    prompts after the last iteration.
    """
    samples = right.shape[2]
    curves = metrics["reward"]
    found = {"final": rewards.mean(axis=(1, 2))}
    for k in (1, 2, 4, 8, 16):
        if k <= samples:
            found[f"pass@{k}"] = np.array([pass_at_k(counts, samples, k).mean() for counts in right.sum(axis=2)])
    for name in ("entropy", "length"):
        found[name] = trailing_mean(metrics[name], how.window)[:, -1]
    found["area"] = np.array([area(curve) for curve in curves])
    found["steps"] = np.array([steps_to(curve, how.threshold, how.window) for curve in curves])
    found["collapsed"] = np.array([float(collapsed(curve, how.window)) for curve in curves])
    return found


def curves_of(metrics: Mapping[str, Floats]) -> dict[str, dict[str, list[float]]]:
    """Mean and interval over the seeds of metrics f64[seeds, iterations], each at most `LONGEST_CURVE` points long."""
    found = {}
    for name in CURVES:
        parts = np.array_split(metrics[name], min(LONGEST_CURVE, metrics[name].shape[1]), axis=1)
        values = np.stack([part.mean(axis=1) for part in parts], axis=1)
        ends = np.cumsum([part.shape[1] for part in parts])
        bounds = [_interval(of_seeds) for of_seeds in values.T]
        found[name] = {
            "iteration": [float(end) for end in ends],
            "mean": [round(float(x), 4) for x in values.mean(axis=0)],
            "low": [round(low, 4) for low, _ in bounds],
            "high": [round(high, 4) for _, high in bounds],
        }
    return found


def _interval(of_seeds: Floats) -> tuple[float, float]:
    """A 95 % interval of the mean over the seeds, f64[seeds]; NaN where a seed has no finite number."""
    return bootstrap(mean, [of_seeds], resamples=500) if np.isfinite(of_seeds).all() else (math.nan, math.nan)


def to_json(outcome: RunOutcome) -> dict[str, Any]:
    """A JSON object of it; numbers that are not finite are null."""
    measures = {name: [_plain(x) for x in values] for name, values in outcome.measures.items()}
    curves = {
        metric: {column: [_plain(x) for x in values] for column, values in curve.items()}
        for metric, curve in outcome.curves.items()
    }
    return outcome._asdict() | {"measures": measures, "curves": curves}


def from_json(value: Mapping[str, Any]) -> RunOutcome:
    """The outcome that `to_json` wrote; null is infinite among the measures ("steps" that were not made)."""
    measures = {name: np.array([math.inf if x is None else x for x in v]) for name, v in value["measures"].items()}
    curves = {
        metric: {column: [math.nan if x is None else x for x in values] for column, values in curve.items()}
        for metric, curve in value["curves"].items()
    }
    return RunOutcome(**{**value, "measures": measures, "curves": curves})


def _plain(x: float) -> float | None:
    return float(f"{x:.6g}") if math.isfinite(x) else None


HEADER = (
    "| method | final reward (95 %) | pass@1 | pass@{k} | entropy | area | steps to {threshold:.2f} | collapsed "
    "| P(better than {baseline}) (95 %) | compile, run, s | note |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


class Summary(NamedTuple):
    """A statistic and its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


def summary_of(statistic: object, *samples: Strata) -> Summary:
    """A statistic of `in_jax.lab.statistics` with its bootstrap interval."""
    assert callable(statistic)
    return Summary(float(statistic(*samples)), *bootstrap(statistic, *samples))


def task_table(outcomes: Iterable[RunOutcome], baseline: str, threshold: float) -> str:
    """A row for each outcome of one task, in their order. baseline: the label of the outcome to compare with."""
    outcomes = list(outcomes)
    against = next((o.measures["final"] for o in outcomes if o.label == baseline and not o.error), None)
    most = next((k for k in (16, 8, 4, 2) for o in outcomes if f"pass@{k}" in o.measures), 1)
    lines = [HEADER.format(k=most, threshold=threshold, baseline=baseline)]
    for outcome in outcomes:
        if outcome.error:
            lines.append(f"| {outcome.label} |" + " - |" * 9 + f" {outcome.error} |")
            continue
        m, seconds, better = outcome.measures, outcome.seconds, "-"
        if against is not None and outcome.label != baseline:
            better = str(summary_of(probability_of_improvement, [m["final"]], [against]))
        lines.append(
            f"| {outcome.label} | {summary_of(mean, [m['final']])} | {m['pass@1'].mean():.3f} "
            f"| {m[f'pass@{most}'].mean():.3f} | {m['entropy'].mean():.2f} | {m['area'].mean():.3f} "
            f"| {steps_text(m['steps'])} | {int(m['collapsed'].sum())} of {len(m['collapsed'])} "
            f"| {better} | {seconds['compile']:.0f}, {seconds['run']:.0f} | {outcome.note} |"
        )
    return "\n".join(lines)


def steps_text(steps: Floats) -> str:
    """The median over all runs, and how many there are where some never came to the threshold.

    >>> steps_text(np.array([10.0, 20.0, math.inf]))
    '20 (2 of 3)'
    >>> steps_text(np.array([10.0, math.inf, math.inf]))
    'never (1 of 3)'
    """
    there = int(np.isfinite(steps).sum())
    middle = float(np.sort(steps)[len(steps) // 2])  # of an even number the higher of two
    text = f"{middle:.0f}" if math.isfinite(middle) else "never"
    return text if there == len(steps) else f"{text} ({there} of {len(steps)})"


def overall(outcomes: Sequence[RunOutcome], tasks: Sequence[str], baseline: str) -> list[tuple[str, Summary, Summary]]:
    """By label, of those that have runs on every task, the best first: the interquartile mean of the final rewards of
    all runs, and the probability of improvement over the baseline."""
    runs: dict[str, dict[str, Floats]] = {}
    for outcome in outcomes:
        if not outcome.error:
            runs.setdefault(outcome.label, {})[outcome.task] = outcome.measures["final"]
    whole = {label: [found[task] for task in tasks] for label, found in runs.items() if set(tasks) <= set(found)}
    against = whole.get(baseline)
    rows = []
    for label, strata in whole.items():
        better = Summary(math.nan, math.nan, math.nan)
        if against is not None and label != baseline:
            better = summary_of(probability_of_improvement, strata, against)
        rows.append((label, summary_of(interquartile_mean, strata), better))
    return sorted(rows, key=lambda row: -row[1].value)


def overall_table(outcomes: Sequence[RunOutcome], tasks: Sequence[str], baseline: str) -> str:
    """`overall` as Markdown."""
    rows = overall(outcomes, tasks, baseline)
    lines = [f"| method | interquartile mean (95 %) | P(better than {baseline}) (95 %) |", "|---|---|---|"]
    lines += [f"| {label} | {iqm} | {'-' if math.isnan(better.value) else better} |" for label, iqm, better in rows]
    return "\n".join(lines)
