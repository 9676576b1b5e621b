"""What a laboratory found, as Markdown: a table for each task, and one over all of them."""

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from jaxrl_llm.in_jax.lab.outcome import Outcome
from jaxrl_llm.in_jax.lab.statistics import (
    Floats,
    Strata,
    bootstrap,
    interquartile_mean,
    mean,
    probability_of_improvement,
)

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


def task_table(outcomes: Iterable[Outcome], baseline: str, threshold: float) -> str:
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


def overall(outcomes: Sequence[Outcome], tasks: Sequence[str], baseline: str) -> list[tuple[str, Summary, Summary]]:
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


def overall_table(outcomes: Sequence[Outcome], tasks: Sequence[str], baseline: str) -> str:
    """`overall` as Markdown."""
    rows = overall(outcomes, tasks, baseline)
    lines = [f"| method | interquartile mean (95 %) | P(better than {baseline}) (95 %) |", "|---|---|---|"]
    lines += [f"| {label} | {iqm} | {'-' if math.isnan(better.value) else better} |" for label, iqm, better in rows]
    return "\n".join(lines)
