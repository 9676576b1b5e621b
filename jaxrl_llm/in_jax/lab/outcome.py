"""The outcome of a method on a task at one point of the grid: numbers of each seed, and curves with intervals."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.in_jax.lab.config import Point
from jaxrl_llm.in_jax.lab.statistics import Floats, area, bootstrap, collapsed, mean, steps_to, trailing_mean
from jaxrl_llm.in_jax.tasks import Task
from jaxrl_llm.reporting.statistics import pass_at_k

CURVES = ("reward", "entropy", "length")  # metrics whose curves are kept
LONGEST_CURVE = 40  # points; single batches are mostly noise


class Measuring(NamedTuple):
    """How runs on a task are measured."""

    task: Task
    threshold: float  # reward to reach
    window: int  # iterations whose mean reward counts as reached, or as the end of a run


class Outcome(NamedTuple):
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
    """The measures of runs, see `Outcome`.

    metrics: f64[seeds, iterations] by name. rewards, right: f64[seeds, prompts, samples], rewards and 0 or 1, of fresh
    prompts after the last iteration.
    """
    samples, curves = right.shape[2], metrics["reward"]
    found = {"final": rewards.mean(axis=(1, 2))}
    for k in (k for k in (1, 2, 4, 8, 16) if k <= samples):
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
        known, none = np.isfinite(values).all(axis=0), (math.nan, math.nan)
        bounds = [bootstrap(mean, [x], resamples=500) if y else none for x, y in zip(values.T, known, strict=True)]
        found[name] = {
            "iteration": [float(end) for end in ends],
            "mean": [round(float(x), 4) for x in values.mean(axis=0)],
            "low": [round(low, 4) for low, _ in bounds],
            "high": [round(high, 4) for _, high in bounds],
        }
    return found


def to_json(outcome: Outcome) -> dict[str, Any]:
    """A JSON object of it; numbers that are not finite are null."""
    measures = {name: [_plain(x) for x in values] for name, values in outcome.measures.items()}
    curves = {name: {k: [_plain(x) for x in v] for k, v in curve.items()} for name, curve in outcome.curves.items()}
    return outcome._asdict() | {"measures": measures, "curves": curves}


def from_json(value: Mapping[str, Any]) -> Outcome:
    """The outcome that `to_json` wrote; null is infinite among the measures ("steps" that were not made)."""
    measures = {name: np.array([math.inf if x is None else x for x in v]) for name, v in value["measures"].items()}
    curves = {
        name: {k: [math.nan if x is None else x for x in v] for k, v in curve.items()}
        for name, curve in value["curves"].items()
    }
    return Outcome(**{**value, "measures": measures, "curves": curves})


def _plain(x: float) -> float | None:
    return float(f"{x:.6g}") if math.isfinite(x) else None
