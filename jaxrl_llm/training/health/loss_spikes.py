"""Which steps are loss spikes: a pure test of a step's metrics against those of the steps before."""

import math
from collections.abc import Mapping
from statistics import median
from typing import Any, NamedTuple

from jaxrl_llm.utils.errors import require_choice

LEAST_SPREAD = 0.05  # of the median: where a metric hardly varies, not every change is a spike


class SpikeRule(NamedTuple):
    """What counts as a spike, and what is done about it."""

    metrics: tuple[str, ...]
    factor: float  # a spike is above median + factor x spread of the last `window` steps
    window: int  # no spike is found before there are that many steps
    rollbacks: int  # at most, within `window` steps


class History(NamedTuple):
    """The state of the test, saved in checkpoints."""

    values: Mapping[str, tuple[float, ...]] = {}  # of each metric, the last `window`
    undone: tuple[int, ...] = ()  # steps that were rolled back, of the last `window`


class _Verdict(NamedTuple):
    """On one step."""

    history: History  # with this step; a step to undo leaves no values
    spike: str  # what is too high, for messages; "" where there is no spike
    undo: bool


def judge(history: History, step: int, metrics: Mapping[str, float], rule: SpikeRule, undoable: bool) -> _Verdict:
    """Whether a step is a spike, and is to be undone: where it can be (`undoable`), and was not too often.

    Spikes that are not undone join the history, so that a metric may settle at another level. Raises InputError for a
    metric that the method does not have.
    """
    spike = ""
    for name in rule.metrics:
        require_choice("metric in spike_metrics", name, metrics)
        values, value = history.values.get(name, ()), metrics[name]
        if len(values) >= rule.window and value > (most := bound(values[-rule.window :], rule.factor)):
            spike = spike or f"{name} is {value:.4g}, above {most:.4g}"
    undone = tuple(one for one in history.undone if one > step - rule.window)
    if spike and undoable and len(undone) < rule.rollbacks:
        return _Verdict(history._replace(undone=(*undone, step)), spike, True)
    seen = {
        name: (*history.values.get(name, ()), metrics[name])[-rule.window :]
        for name in rule.metrics
        if math.isfinite(metrics[name])
    }
    return _Verdict(History({**history.values, **seen}, undone), spike, False)


def bound(values: tuple[float, ...], factor: float) -> float:
    """median + factor x MAD of some values; MAD, the median distance from the median, is at least 5 % of the median.

    Infinite where both are 0, as where most steps had no learning signal.

    >>> round(bound((1.0, 2.0, 3.0, 4.0, 100.0), factor=10.0), 6)
    13.0
    """
    middle = median(values)
    spread = max(median(abs(value - middle) for value in values), LEAST_SPREAD * abs(middle))
    return middle + factor * spread if spread else math.inf


def as_history(saved: Mapping[str, Any]) -> History:
    """The history from `_asdict()` after a round trip through JSON."""
    return History({name: tuple(values) for name, values in saved["values"].items()}, tuple(saved["undone"]))
