"""The report of a run: a self-contained HTML file with curves, evaluations and completions shaded by token."""

from __future__ import annotations

import html
import io
import json
import math
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxrl_llm.errors import InputError, missing_package, shown
from jaxrl_llm.reporting.lines import iterate_completions
from jaxrl_llm.reporting.shading import KINDS, LEVELS, shaded_tokens, style_rules
from jaxrl_llm.reporting.statistics import as_number, thin, typical_size
from jaxrl_llm.reporting.writers import read_json, read_jsonl

_POINTS = 300  # maximum points of a curve, about the width of a chart in pixels
_TOKENS = 25_000  # tokens shown in total, about 2.5 MB of HTML
# Shown at most: training steps, prompts per step, samples per prompt, evaluation prompts per kind of change.
_STEPS, _PROMPTS, _SAMPLES, _PAIRS = 6, 2, 8, 2
_OTHER_CHARTS = 60
_CHARTS = {  # the main charts: title, and a pattern of the metrics' keys
    "Reward": r"reward/mean",
    "KL to the reference": r"(?!.*mismatch)(.*/)?kl(/mean)?",
    "Entropy": r"entropy(/mean)?",
    "Completion length (tokens)": r"completion/length(/mean)?",
    "Clip fraction": r".*clip.*frac.*|clip/(low|high)",
    "Gradient norm": r".*grad(ient)?s?[_/]norm.*",
    "Goodput": r"goodput",
    "Learning rate": r"(.*/)?learning_rate|lr",
    "Mismatch of sampler and trainer": r".*mismatch.*",
}
# Placeholder colours, replaced by those of the page's light or dark theme.
_INK, _LINE, _LATE = "#010203", "#010204", "#010205"


def write_report(run_folder: Path, more: Mapping[str, str] | None = None) -> Path:
    """Write `report.html` into a run's folder from the files in it, and return its path.

    Reads config.json, metrics.jsonl, summary.json and completions.jsonl; any of them, but not all, may be missing or
    empty. The page makes no network requests and stays below 5 MB: curves are thinned (mean, with the range as a band),
    and completions of a few steps are shown. more: sections to append, {heading: HTML}. Needs jinja2 and matplotlib.
    Raises InputError if there is no run, or a file is damaged (a half-written last line is not damage).
    """
    try:
        import jinja2
    except ImportError as error:
        raise missing_package("jinja2", "run", "writing the report") from error
    folder = Path(run_folder)
    files = [folder / name for name in ("config.json", "summary.json", "metrics.jsonl", "completions.jsonl")]
    if not any(file.exists() for file in files):
        raise InputError(f"no run in {folder}: it has neither config.json nor metrics.jsonl")
    config, summary = map(read_json, files[:2])
    metrics = read_jsonl(files[2]) if files[2].exists() else []
    index = _index(files[3]) if files[3].exists() else []
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters["number"] = _show
    source = Path(__file__).with_name("report.html.j2").read_text(encoding="utf-8")
    parts: dict[str, Any] = _curves(metrics, files[2]) | _completions(files[3], index)
    parts["histograms"] = _histograms([row for row in index if row.phase == "train"])
    parts["palette"] = "".join(map(style_rules, KINDS))
    try:
        text = environment.from_string(source).render(
            title=folder.resolve().name, config=config, summary=summary, more=more or {}, **parts
        )
    except (TypeError, ValueError, ArithmeticError, RecursionError, jinja2.TemplateError) as error:
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{files[0]} or {files[1]} holds a value that no report can show: {reason}") from error
    path, new = folder / "report.html", folder / "report.html.new"
    new.write_bytes(text.encode("utf-8", "replace"))  # a lone surrogate in a completion must not stop the report
    os.replace(new, path)
    return path


class _Row(NamedTuple):  # the part of a line of completions.jsonl that is kept in memory
    step: int
    phase: str
    prompt_id: int
    reward: float
    length: int  # in tokens
    offset: int  # in bytes, to read the rest later


def _index(path: Path) -> list[_Row]:
    return [
        _Row(row["step"], row["phase"], row["prompt_id"], as_number(row.get("reward")), len(row["tokens"]), offset)
        for offset, row in iterate_completions(path)
    ]


def _completions(path: Path, index: list[_Row]) -> dict[str, Any]:
    """The completions to show, read and shaded: some training steps, and pairs from before and after training.

    Within a step, prompts whose samples differ in reward come first, since the others typically have no advantages.
    Pairs are examples of each kind of change in reward; `changes` counts all of each kind.
    """
    by_step: dict[int, dict[int, list[_Row]]] = defaultdict(lambda: defaultdict(list))
    for row in index:
        if row.phase == "train":
            by_step[row.step][row.prompt_id].append(row)
    steps = sorted(by_step)
    steps = [steps[i] for i in np.unique(np.linspace(0, len(steps) - 1, min(len(steps), _STEPS)).astype(int))]
    groups = {s: sorted(by_step[s].values(), key=lambda rows: len({r.reward for r in rows}) == 1) for s in steps}
    train = {step: [(rows[:_SAMPLES], len(rows)) for rows in groups[step][:_PROMPTS]] for step in steps}
    before, after = (
        {row.prompt_id: row for row in reversed(index) if row.phase == phase} for phase in ("eval_before", "eval_after")
    )
    changes: dict[str, list[list[_Row | None]]] = {"rose": [], "fell": [], "stayed": [], "is known once": []}
    for prompt in sorted(before.keys() | after.keys()):
        pair = [before.get(prompt), after.get(prompt)]
        first, last = (math.nan if row is None else row.reward for row in pair)
        change = "rose" if last > first else "fell" if last < first else "stayed" if last == first else "is known once"
        changes[change].append(pair)
    pairs = [pair for examples in changes.values() for pair in examples[:_PAIRS]]
    shown = [row for items in train.values() for rows, _ in items for row in rows]
    shown += [row for pair in pairs for row in pair if row]
    samples: dict[int, dict[str, Any]] = {}
    if shown:
        with open(path, "rb") as file:
            for row in shown:
                file.seek(row.offset)
                samples[row.offset] = json.loads(file.readline())
    kinds = [kind for kind in KINDS if any(sample.get(kind) for sample in samples.values())]
    limits = {kind: typical_size(chain.from_iterable(s.get(kind) or () for s in samples.values())) for kind in kinds}
    for sample in samples.values():
        values = {kind: sample[kind] for kind in kinds if sample.get(kind)}
        sample["html"] = shaded_tokens(sample["tokens"], values, limits, most=max(60, _TOKENS // len(samples)))
    return {
        "train": {s: [([samples[r.offset] for r in rows], n) for rows, n in items] for s, items in train.items()},
        "pairs": [[row and samples[row.offset] for row in pair] for pair in pairs],
        "changes": {change: len(examples) for change, examples in changes.items() if examples},
        "limits": limits,
        "levels": LEVELS,
    }


def _curves(metrics: Sequence[Mapping[str, Any]], path: Path) -> dict[str, Any]:
    """Charts (title, key, SVG, last value) of the main metrics and of the others, and the keys without a chart.

    A curve has at most `_POINTS` points, each the mean of a run of steps. The band is the range of those steps, or that
    of the metrics' min and max, or of one standard deviation, if they are logged.
    """
    for row in metrics:
        at = row.get("step", 0)
        if not isinstance(at, int) or isinstance(at, bool) or not 0 <= at < 2**53:
            raise InputError(f"{path}: a step is {shown(at)}, but must be a whole number; repair or remove that line")
    rows = sorted({row["step"]: row for row in metrics if "step" in row}.items())
    steps = np.array([step for step, _ in rows], dtype=np.float64)
    keys = sorted(set().union(*(row for _, row in rows)) - {"step"})
    columns = {key: np.array([as_number(row.get(key)) for _, row in rows]) for key in keys}
    drawn = {key: values for key, values in columns.items() if np.isfinite(values).any()}
    charts: list[tuple[str, str, str, float]] = []
    used: set[str] = set()

    def add(title: str, key: str) -> None:
        base, values = key.removesuffix("/mean"), drawn[key]
        low, high = (drawn.get(f"{base}/{end}", values) for end in ("min", "max"))
        if (spread := drawn.get(f"{base}/std")) is not None and low is high:
            low, high = values - spread, values + spread

        def draw(axes: Any) -> None:
            x, y = thin(steps, _POINTS), thin(values, _POINTS)
            band = thin(low, _POINTS, np.min), thin(high, _POINTS, np.max)
            axes.fill_between(x, *band, color=_LINE, alpha=0.18, linewidth=0)
            axes.plot(x, y, color=_LINE, linewidth=1.4, marker="." if np.isfinite(y).sum() < 30 else "")

        charts.append((title, key, _svg(key, draw), float(values[np.isfinite(values)][-1])))
        used.update([key, *(f"{base}/{name}" for name in ("min", "max", "std"))])

    for title, pattern in _CHARTS.items():
        for key in drawn:
            if key not in used and re.fullmatch(pattern, key):
                add(title, key)
    main = len(charts)
    rest = [key for key in drawn if key not in used]
    for key in rest[:_OTHER_CHARTS]:
        add("", key)
    missing = rest[_OTHER_CHARTS:] + sorted(columns.keys() - drawn.keys())
    return {"steps": len(rows), "charts": charts[:main], "others": charts[main:], "missing": missing}


def _histograms(train: Sequence[_Row]) -> list[tuple[str, str, list[str]]]:
    """Histograms of rewards and lengths in the first and the last quarter of the steps: (title, SVG, labels)."""
    steps = sorted({row.step for row in train})
    quarter = max(1, len(steps) // 4)
    spans = [(part[0], part[-1]) for part in (steps[:quarter], steps[quarter:][-quarter:]) if part]
    charts = []
    for title, field in (("Rewards", "reward"), ("Completion lengths (tokens)", "length")):
        parts = [[getattr(row, field) for row in train if first <= row.step <= last] for first, last in spans]
        parts = [[value for value in part if math.isfinite(value)] for part in parts]
        if not any(parts):
            continue
        values = np.array(list(chain.from_iterable(parts)))
        low, high = float(values.min()), float(values.max())
        if high - low < 1e-9 * max(abs(low), abs(high), 1e-9):  # too narrow for twenty bins
            low, high = low - max(abs(low), 1.0) / 2, high + max(abs(high), 1.0) / 2
        edges = np.linspace(low, high, 21)

        def draw(axes: Any, parts: list[list[float]] = parts, edges: np.ndarray = edges) -> None:
            for part, colour in zip(parts, (_LINE, _LATE), strict=False):
                shares = np.histogram(part, edges)[0] / max(1, len(part))
                axes.stairs(shares, edges, color=colour, alpha=0.3, fill=True)
                axes.stairs(shares, edges, color=colour, linewidth=1.4)
            axes.set_ylabel("share of samples")

        charts.append((title, _svg(title, draw), [f"steps {first} to {last}" for first, last in spans]))
    return charts


def _svg(name: str, draw: Callable[[Any], None]) -> str:
    """The drawing as an SVG element with the page's colours, and with ids made unique by `name`."""
    try:
        import matplotlib
        from matplotlib.figure import Figure
    except ImportError as error:
        raise missing_package("matplotlib", "run", "drawing the report's curves") from error
    inks = ("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color", "grid.color")
    style: Any = dict.fromkeys(inks, _INK) | dict.fromkeys(("axes.spines.top", "axes.spines.right"), False)
    style |= {"svg.fonttype": "none", "svg.hashsalt": name, "font.size": 8, "axes.grid": True, "grid.alpha": 0.15}
    with matplotlib.rc_context(style | {"axes.formatter.useoffset": False, "axes.formatter.limits": (-3, 4)}):
        figure = Figure(figsize=(3.8, 2.1), layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(buffer, format="svg", transparent=True, metadata=nothing)
    text = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>s{zlib.crc32(name.encode())}-", buffer.getvalue())
    text = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg \1 role="img" aria-label="{html.escape(name)}">', text)
    for stand_in, colour in ((_INK, "currentColor"), (_LINE, "var(--line)"), (_LATE, "var(--late)")):
        text = text.replace(stand_in, colour)
    return text[text.index("<svg") :]


def _show(value: Any) -> str:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return "-" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**30 else shown(value)
    return f"{value:.4g}" if math.isfinite(value) else "-"
