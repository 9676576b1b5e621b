"""The curves of one or several runs: the main metrics first, each a chart; for reports and notebooks."""

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jaxrl_llm.reporting.html.charts import COLOURS, Chart, Curve, curve_chart, histogram_chart, unit_of
from jaxrl_llm.reporting.html.run_data import Row, RunData
from jaxrl_llm.reporting.statistics import clustered_interval, pass_at_k
from jaxrl_llm.utils.errors import InputError, require_choice

_MAIN = {  # the main charts: title, and a pattern of the metrics' keys
    "Reward": r"reward/mean",
    "Groups without signal": r"(.*/)?groups/uniform",
    "Entropy": r"entropy(/mean)?",
    "KL to the reference": r"(?!.*mismatch)(.*/)?kl(/mean)?",
    "Completion length": r"completion/length(/mean)?",
    "Cut off by the token limit": r"completion/truncated",
    "Clip fraction": r".*clip.*frac.*|clip/(low|high)",
    "Gradient norm": r".*grad(ient)?s?[_/]norm.*",
    "Mismatch of sampler and trainer": r".*mismatch.*",
    "Learning rate": r"(.*/)?learning_rate|lr",
    "Goodput": r"goodput",
}
# The colours of curves in light and dark surroundings; in a page, --line0 to --line7.
LIGHT = ("#1f66c7", "#b84d06", "#26794a", "#8a4aca", "#8a6a10", "#2f7d8f", "#b5446e", "#5f6870")
DARK = ("#70a8f5", "#f29a55", "#63c48b", "#bd93ee", "#d3ad45", "#69bccf", "#ee86ab", "#a9b2bb")


@dataclass(frozen=True, repr=False)
class Curves:
    """Charts of metrics; a notebook displays them, `svgs` has each as an SVG element."""

    charts: tuple[Chart, ...]
    runs: tuple[str, ...]

    @property
    def svgs(self) -> dict[str, str]:
        """SVG documents by metric, for files and other pages; axes are in the text's own colour."""
        head = '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '
        svgs = {chart.key: chart.svg.replace("<svg ", head, 1) for chart in self.charts}

        def light(number: re.Match[str]) -> str:
            return LIGHT[int(number[1])]

        return {key: re.sub(r"var\(--line(\d)\)", light, svg) for key, svg in svgs.items()}

    def __repr__(self) -> str:
        return f"{len(self.charts)} curves of {', '.join(self.runs)}: {', '.join(chart.key for chart in self.charts)}"

    def _repr_html_(self) -> str:
        figures = "".join(
            '<figure style="margin:0 1em 1em 0;width:24em;max-width:100%">'
            f"<figcaption><b>{html.escape(chart.title)}</b> <code>{html.escape(chart.key)}</code></figcaption>"
            f"{chart.svg}</figure>"
            for chart in self.charts
        )
        names = "".join(
            f'<span style="margin-right:1em"><b style="color:var(--line{n % COLOURS})">&#9632;</b> '
            f"{html.escape(name)}</span>"
            for n, name in enumerate(self.runs)
        )
        style = f"<style>.jaxrl-curves{{font:13px/1.5 system-ui,sans-serif;{variables(LIGHT)}}}</style>"
        legend = f"<p>{names}</p>" if len(self.runs) > 1 else ""
        row = f'<div style="display:flex;flex-wrap:wrap">{figures}</div>'
        return f'{style}<div class="jaxrl-curves">{legend}{row}</div>'


def plot_runs(runs: str | Path | Sequence[str | Path], metrics: Sequence[str] | None = None) -> Curves:
    """The curves of a run's folder, or of several over each other, for a notebook.

    metrics: keys of metrics.jsonl; by default the main ones that the runs have. Raises InputError if there is no run, a
    file is damaged, or no run has such a metric. Needs matplotlib.
    """
    folders = [runs] if isinstance(runs, str | Path) else list(runs)
    if not folders:
        raise InputError("no runs to plot: give the folder of at least one")
    data = [RunData(folder) for folder in folders]
    known = {key for run in data for key in run.metrics}
    for key in metrics or ():
        require_choice("metric", key, known)
    named = main_metrics(data) if metrics is None else [(title_of(key), key) for key in metrics]
    return Curves(tuple(chart_of(data, key, title) for title, key in named), tuple(folder_names(data)))


def title_of(key: str) -> str:
    """The title of a main metric; another has its key."""
    return next((title for title, pattern in _MAIN.items() if re.fullmatch(pattern, key)), key)


def main_metrics(runs: Sequence[RunData]) -> list[tuple[str, str]]:
    """(title, key) of the main metrics that any of the runs has."""
    keys, found = sorted({key for run in runs for key in run.metrics}), dict[str, str]()
    for title, pattern in _MAIN.items():
        found |= {key: title for key in keys if key not in found and re.fullmatch(pattern, key)}
    return [(title, key) for key, title in found.items()]


def chart_of(runs: Sequence[RunData], key: str, title: str = "") -> Chart:
    """A metric over the steps of the runs that have it, each in the colour of its place."""
    names = folder_names(runs) if len(runs) > 1 else [""]
    curves = [
        Curve(name, run.steps, run.metrics[key], colour=number)
        for number, (name, run) in enumerate(zip(names, runs, strict=True))
        if key in run.metrics
    ]
    return curve_chart(title, key, curves, unit_of(key))


def folder_names(runs: Sequence[RunData]) -> list[str]:
    """The folders' names, with their parents' where two are alike."""
    short = [run.name for run in runs]
    return short if len(set(short)) == len(short) else [str(run.folder) for run in runs]


def histograms(train: Sequence[Row]) -> list[tuple[Chart, list[str]]]:
    """Rewards and lengths in the first and the last quarter of the logged steps, with the labels of both."""
    steps = sorted({row.step for row in train})
    quarter = max(1, len(steps) // 4)
    spans = [(part[0], part[-1]) for part in (steps[:quarter], steps[quarter:][-quarter:]) if part]
    charts = []
    for title, unit, field in (("Rewards", "reward", "reward"), ("Completion lengths", "tokens", "length")):
        parts = [[getattr(row, field) for row in train if first <= row.step <= last] for first, last in spans]
        parts = [[value for value in part if np.isfinite(value)] for part in parts]
        if any(parts):
            charts.append((histogram_chart(title, parts, unit), [f"steps {first} to {last}" for first, last in spans]))
    return charts


def pass_at_k_chart(runs: Sequence[RunData]) -> tuple[Chart, list[tuple[int, str]]] | None:
    """pass@k against k with 95 % intervals, and (colour, label) of its curves; None if there is nothing to draw.

    Curves are evaluations with several samples (in summary.json, or eval*.json from `jaxrl eval --output`), and for a
    run alone also its training groups in the first and last quarter of the logged steps.
    """
    curves: list[Curve] = []
    for name, run in zip(folder_names(runs), runs, strict=True):
        for title, figures in run.evaluations().items():
            label = title if len(runs) == 1 else f"{name}, {title}"
            at = sorted((int(k), value) for k, value in figures["pass_at"].items())
            columns = [np.array([value[part] for _, value in at], np.float64) for part in ("value", "low", "high")]
            k = np.array([k for k, _ in at], np.float64)
            curves.append(_in_percent(f"held-out, {label}", k, columns, len(curves)))
    if len(runs) == 1:
        curves += _training_pass_at_k(runs[0].rows, len(curves))
    if not curves:
        return None
    chart = curve_chart("pass@k", "", curves, "pass@k, %", "k, samples per prompt", doubling=True)
    return chart, [(curve.colour, curve.name) for curve in curves]


def variables(colours: Iterable[str]) -> str:
    """CSS declarations of the curves' colours."""
    return ";".join(f"--line{number}:{colour}" for number, colour in enumerate(colours))


def _training_pass_at_k(rows: Sequence[Row], colour: int) -> list[Curve]:
    """pass@k of the groups in the first and last quarter of the logged steps, for groups of the most common size."""
    groups: dict[tuple[int, int], list[bool]] = {}
    for row in rows:
        if row.phase == "train" and row.correct is not None:
            groups.setdefault((row.step, row.prompt_id), []).append(row.correct)
    sizes = [len(group) for group in groups.values()]
    size = max(sorted(set(sizes)), key=sizes.count, default=1)
    whole = {key: sum(group) for key, group in groups.items() if len(group) == size}
    steps = sorted({step for step, _ in whole})
    if size < 2 or len(steps) < 2 or not any(whole.values()):
        return []
    quarter = max(1, len(steps) // 4)
    found = []
    for number, part in enumerate((steps[:quarter], steps[-quarter:])):
        counts = [count for (step, _), count in whole.items() if part[0] <= step <= part[-1]]
        k = np.array([2**n for n in range(size.bit_length()) if 2**n <= size])
        values = [pass_at_k(counts, size, int(each)) for each in k]
        ends = [clustered_interval(value, size / each) for value, each in zip(values, k.tolist(), strict=True)]
        columns: list[Any] = [[value.mean() for value in values], [low for low, _ in ends], [high for _, high in ends]]
        label = f"training, steps {part[0]} to {part[-1]}" if part[0] < part[-1] else f"training, step {part[0]}"
        found.append(_in_percent(label, k.astype(np.float64), [np.array(x) for x in columns], colour + number))
    return found


def _in_percent(name: str, k: Any, columns: Sequence[Any], colour: int) -> Curve:
    value, low, high = (100 * column for column in columns)
    return Curve(name, k, value, low, high, colour)
