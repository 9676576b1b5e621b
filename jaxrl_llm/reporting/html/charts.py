"""Charts as SVG elements in the colours of the page around them, with the numbers behind them for a pointer to read."""

import html
import io
import json
import math
import re
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from jaxrl_llm.reporting.statistics import thin
from jaxrl_llm.utils.errors import optional_package

POINTS = 300  # maximum points of a curve, about the width of a chart in pixels
RAW = 40  # a longer curve is drawn with its moving mean on top
COLOURS = 8  # of curves: the page's variables --line0 to --line7
# Placeholder colours, replaced by those of the page's light or dark theme.
_INK, _LINES = "#010203", tuple(f"#0102{4 + n:02x}" for n in range(COLOURS))
_WIDTH, _HEIGHT = 3.9, 2.15  # inches
_BOX = (0.165, 0.205, 0.975, 0.92)  # of the axes in the figure: left, bottom, right, top
# Units of the metrics' axes; the first pattern that matches a key.
_UNITS = (
    (r"reward/unscored|.*/failed|.*truncated|(.*/)?groups/uniform", "share"),
    (r"reward.*|return.*", "reward"),
    (r"(.*/)?completion/(length|longest).*|.*length.*", "tokens"),
    (r".*tokens_per_second", "tokens/s"),
    (r".*(^|[/_])tokens", "tokens"),
    (r"seconds/.*|.*_seconds", "seconds"),
    (r"mismatch|(.*/)?kl(/.*)?|.*mismatch/kl|.*entropy(/mean)?", "nats per token"),
    (r".*clip.*|signal|goodput|packing/filled|rollout/(occupancy|stale_tokens|prompt_padding)", "share"),
    (r".*_bytes", "bytes"),
    (r".*grad(ient)?s?[_/]norm.*", "norm"),
    (r".*learning_rate.*|lr", "learning rate"),
    (r".*ratio.*", "ratio"),
)


class Curve(NamedTuple):
    """A line of a chart; `low` and `high`, where given, are drawn as error bars of its points."""

    name: str
    x: npt.NDArray[np.float64]
    y: npt.NDArray[np.float64]  # NaN is a gap
    low: npt.NDArray[np.float64] | None = None
    high: npt.NDArray[np.float64] | None = None
    colour: int = 0  # a number of the page's variables --line


class Chart(NamedTuple):
    """A drawn chart: its SVG element, and a JSON object with what a pointer over it needs to know."""

    title: str
    key: str
    svg: str
    data: str
    last: float  # the last value of the first curve, NaN if there is none


def unit_of(key: str) -> str:
    """What a metric is measured in, as the label of its axis.

    >>> unit_of("groups/uniform"), unit_of("completion/length"), unit_of("mine/odd")
    ('share', 'tokens', 'value')
    """
    return next((unit for pattern, unit in _UNITS if re.fullmatch(pattern, key)), "value")


def curve_chart(
    title: str, key: str, curves: Sequence[Curve], unit: str, x_label: str = "step", doubling: bool = False
) -> Chart:
    """A line chart. doubling: a logarithmic axis to base 2, for k = 1, 2, 4 ...

    A curve has at most POINTS points: of a longer one, each is the mean of neighbouring values, and their range is
    shaded. Of more than RAW points, the moving mean is drawn over the values.
    """
    name = f"{title} {key} {x_label}"
    shown = list[tuple[Any, ...]]()  # x, y, and the range of the values that each point stands for, if they are several
    for curve in curves:
        ends = (thin(curve.y, POINTS, end) if len(curve.y) > POINTS else None for end in (np.min, np.max))
        shown.append((thin(curve.x, POINTS), thin(curve.y, POINTS), *ends))

    def draw(axes: Any) -> None:
        for (x, y, low, high), curve in zip(shown, curves, strict=True):
            colour = _LINES[curve.colour % COLOURS]
            known = int(np.isfinite(y).sum())
            if low is not None:
                axes.fill_between(x, low, high, color=colour, alpha=0.16, linewidth=0)
            if known > RAW:
                axes.plot(x, y, color=colour, linewidth=0.7, alpha=0.5)
                axes.plot(x, moving_mean(y), color=colour, linewidth=1.7)
            else:
                axes.plot(x, y, color=colour, linewidth=1.4, marker="o", markersize=2.6 if known < 30 else 0)
            if curve.low is not None and curve.high is not None:
                axes.vlines(x, curve.low, curve.high, color=colour, linewidth=1.1, alpha=0.7)
        axes.set_xlabel(x_label)
        axes.set_ylabel(unit)
        axes.set_ylim(_limits(axes.get_ylim(), [y for _, y, _, _ in shown], unit))
        if doubling:
            from matplotlib.ticker import NullLocator

            ticks = sorted({float(value) for curve in curves for value in curve.x})
            axes.set_xscale("log", base=2)
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.xaxis.set_minor_locator(NullLocator())
        else:
            from matplotlib.ticker import MaxNLocator

            axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))

    first = curves[0].y[np.isfinite(curves[0].y)] if curves else np.zeros(0)
    svg, view = _svg(name, _described(title or key, unit, curves), draw)
    lines = [
        {"name": curve.name, "colour": curve.colour % COLOURS, "x": _numbers(x), "y": _numbers(y)}
        for (x, y, _, _), curve in zip(shown, curves, strict=True)
    ]
    data = {"view": view, "log": doubling, "unit": unit, "x": x_label, "lines": lines}
    return Chart(title, key, svg, json.dumps(data), float(first[-1]) if first.size else math.nan)


def histogram_chart(title: str, parts: Sequence[Sequence[float]], unit: str) -> Chart:
    """Histograms of finite values over each other, as shares of each part, in the colours 0, 1 ..."""
    values = np.array([value for part in parts for value in part], dtype=np.float64)
    low, high = float(values.min()), float(values.max())
    if high - low < 1e-9 * max(abs(low), abs(high), 1e-9):  # too narrow for twenty bins
        low, high = low - max(abs(low), 1.0) / 2, high + max(abs(high), 1.0) / 2
    edges = np.linspace(low, high, 21)
    shares = [np.histogram(part, edges)[0] / max(1, len(part)) for part in parts]

    def draw(axes: Any) -> None:
        for number, part in enumerate(shares):
            axes.stairs(part, edges, color=_LINES[number], alpha=0.3, fill=True)
            axes.stairs(part, edges, color=_LINES[number], linewidth=1.4)
        axes.set_xlabel(unit)
        axes.set_ylabel("share of samples")

    svg, view = _svg(title, f"{title}: a histogram", draw)
    middle = _numbers((edges[:-1] + edges[1:]) / 2)
    lines = [{"name": "", "colour": number, "x": middle, "y": _numbers(part)} for number, part in enumerate(shares)]
    data = {"view": view, "log": False, "unit": "share", "x": unit, "lines": lines}
    return Chart(title, "", svg, json.dumps(data), math.nan)


def moving_mean(values: npt.ArrayLike, share: float = 1 / 12) -> npt.NDArray[np.float64]:
    """The mean of each value and its neighbours, over a window of this share of the series; gaps stay gaps.

    >>> moving_mean([0.0, 3.0, 6.0, float("nan")], share=0.5).tolist()
    [1.5, 3.0, 4.5, nan]
    """
    series = np.asarray(values, dtype=np.float64)
    half = max(1, round(len(series) * share / 2))
    known = np.isfinite(series)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, series, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    place = np.arange(len(series))
    low, high = np.maximum(place - half, 0), np.minimum(place + half + 1, len(series))
    return np.where(known, (total[high] - total[low]) / np.maximum(count[high] - count[low], 1), np.nan)


def _limits(ends: tuple[float, float], columns: Sequence[npt.NDArray[Any]], unit: str) -> tuple[float, float]:
    """The ends of the vertical axis: apart where all values are alike, and from 0 for shares."""
    low, high = ends
    values = np.concatenate(columns) if columns else np.zeros(0)
    values = values[np.isfinite(values)]
    if values.size and np.ptp(values) <= 1e-6 * np.abs(values).max():
        size = abs(float(values[0])) or 1.0
        low, high = float(values[0]) - size / 2, float(values[0]) + size / 2
    if unit == "share" and values.size and values.min() >= 0:
        low = -0.03 * high
    return low, high


def _described(title: str, unit: str, curves: Sequence[Curve]) -> str:
    """The chart in words, for screen readers."""
    parts = []
    for curve in curves:
        known = np.flatnonzero(np.isfinite(curve.y))
        if known.size:
            first, last = known[0], known[-1]
            ends = (curve.y[first], curve.x[first], curve.y[last], curve.x[last])
            parts.append(f"{curve.name}: from {ends[0]:.4g} at {ends[1]:g} to {ends[2]:.4g} at {ends[3]:g}".strip(": "))
    return f"{title} ({unit}): {'; '.join(parts)}"


def _numbers(values: npt.NDArray[Any]) -> list[float | None]:
    return [float(f"{value:.4g}") if math.isfinite(value) else None for value in values.tolist()]


def _svg(name: str, description: str, draw: Callable[[Any], None]) -> tuple[str, list[float]]:
    """The drawing as an SVG element in the page's colours, with ids made unique by `name`, and its coordinates.

    Coordinates: the axes' left, top, right and bottom in the SVG's units, then the data's values there.
    """
    with optional_package("matplotlib", "run", "drawing the report's curves"):
        import matplotlib
        from matplotlib.figure import Figure
    inks = ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")
    style: Any = dict.fromkeys(inks, _INK) | dict.fromkeys(("axes.spines.top", "axes.spines.right"), False)
    style |= {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 8, "axes.grid": True, "grid.alpha": 0.15}
    left, bottom, right, top = _BOX
    with matplotlib.rc_context(style | {"axes.formatter.useoffset": False, "axes.formatter.limits": (-3, 4)}):
        figure = Figure(figsize=(_WIDTH, _HEIGHT))
        axes = figure.add_axes((left, bottom, right - left, top - bottom))
        draw(axes)
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>s{zlib.crc32(name.encode())}-", buffer.getvalue())
    opening = f' role="img" aria-label="{html.escape(description)}">'
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', lambda found: f"<svg {found[1]}{opening}", text)
    text = text.replace(_INK, "currentColor")
    for number, stand_in in enumerate(_LINES):
        text = text.replace(stand_in, f"var(--line{number})")
    width, height = 72 * _WIDTH, 72 * _HEIGHT
    box = [left * width, (1 - top) * height, right * width, (1 - bottom) * height]
    (low, high), (least, most) = axes.get_xlim(), axes.get_ylim()
    view = [round(value, 2) for value in box] + [float(f"{value:.6g}") for value in (low, most, high, least)]
    return text[text.index("<svg") :], view
