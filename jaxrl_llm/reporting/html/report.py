"""The report of a run, or of several: a self-contained HTML file that begins with the verdict."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_llm.reporting.html.charts import COLOURS
from jaxrl_llm.reporting.html.conversations import as_tree
from jaxrl_llm.reporting.html.curves import (
    DARK,
    LIGHT,
    chart_of,
    folder_names,
    histograms,
    main_metrics,
    pass_at_k_chart,
    variables,
)
from jaxrl_llm.reporting.html.overview import Defaults, breakable, overview, side_by_side
from jaxrl_llm.reporting.html.run_data import RunData
from jaxrl_llm.reporting.html.shading import KINDS, LEVELS, level_value, style_rules
from jaxrl_llm.reporting.html.shown_completions import (
    chosen_groups,
    held_out_examples,
    reward_changes,
    shaded_samples,
    shared_beginning,
    squares,
    training_groups,
)
from jaxrl_llm.reporting.html.timeline import timeline
from jaxrl_llm.reporting.html.verdict import held_out
from jaxrl_llm.reporting.prompt_table import counts_in_words, groups_text, prompt_table, tried_text
from jaxrl_llm.utils.errors import InputError, optional_package, shown
from jaxrl_llm.utils.storage import replace_file

_OTHER_CHARTS = 60
_TEMPLATES = Path(__file__).parent


def write_report(
    run_folder: str | Path | Sequence[str | Path],
    more: Mapping[str, str] | None = None,
    *,
    defaults: Defaults | None = None,
    output: str | Path | None = None,
) -> Path:
    """Write the report of a run, or of several in one page, from the files in their folders, and return its path.

    Reads config.json, metrics.jsonl, summary.json, completions.jsonl, groups.jsonl, left_out.npz and eval*.json; any of
    them, but not all, may be missing or empty. The page makes no network requests and stays below 5 MB: curves are
    thinned, and completions of some groups and held-out prompts are shown; it says how many of how many.

    more: sections to append, {heading: HTML}. defaults: of a run's settings, given its config.json, to show first what
    differs from them. output: the file, by default report.html in the run's folder, or comparison.html in that of the
    first of several runs. Needs jinja2 and matplotlib. Raises InputError if there is no run, or a file is damaged (a
    half-written last line is not damage).
    """
    with optional_package("jinja2", "run", "writing the report"):
        import jinja2
    folders = [run_folder] if isinstance(run_folder, str | Path) else list(run_folder)
    if not 1 <= len(folders) <= COLOURS:
        raise InputError(f"a report is of 1 to {COLOURS} runs, but found {len(folders)}")
    runs = [RunData(folder) for folder in folders]
    name = "report.html" if len(runs) == 1 else "comparison.html"
    path = Path(output) if output is not None else runs[0].folder / name
    loader = jinja2.FileSystemLoader(_TEMPLATES)
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=loader)
    environment.filters["number"] = _show
    environment.filters["breakable"] = breakable
    context = {**_curves(runs), **(_one_run(runs[0], defaults) if len(runs) == 1 else side_by_side(runs, defaults))}
    context |= {"title": " and ".join(folder_names(runs)), "more": more or {}, "style": _style()}
    script = (_TEMPLATES / "report.js").read_text(encoding="utf-8")
    try:
        text = environment.get_template("report.html.j2").render(script=script, **context)
    except (TypeError, ValueError, ArithmeticError, RecursionError, jinja2.TemplateError) as error:
        files = " or ".join(f"{run.config_file} or {run.summary_file}" for run in runs)
        reason = " ".join(str(error).split())[:200]
        raise InputError(f"{files} holds a value that no report can show: {reason}") from error
    try:
        replace_file(path, text.encode("utf-8", "replace"))  # a lone surrogate in a completion must not stop the report
    except OSError as error:
        raise InputError(f"the report cannot be written to {path}: {error.strerror or error}") from error
    return path


def _one_run(run: RunData, defaults: Defaults | None) -> dict[str, Any]:
    """The parts of a report that only one run has: outcomes, groups of completions and distributions."""
    found, groups = held_out(run), training_groups(run.rows)
    chosen, examples = chosen_groups(groups), held_out_examples(run.rows, found)
    pairs = [row for one in examples for pair in one.pairs for row in pair if row is not None]
    samples, limits = shaded_samples(run, {"held": pairs, "train": [row for group in chosen for row in group.shown]})
    return {
        "shared": shared_beginning(one.get("context") or one.get("prompt") or "" for one in samples.values()),
        "runs": [overview(run, defaults)],
        "histograms": histograms([row for row in run.rows if row.phase == "train"]),
        "matrix": dict(zip(("right", "fixed", "broken", "wrong"), found.counts, strict=True)),
        "squares": squares(found),
        "examples": [
            (one.kind, one.total, [[row and samples[row.offset] for row in pair] for pair in one.pairs])
            for one in examples
        ],
        "changes": reward_changes(run.rows),
        "groups": [(group, as_tree([samples[row.offset] for row in group.shown])) for group in chosen],
        "logged_groups": len(groups),
        "timeline": timeline(run),
        "prompts": _prompts(run),
        "scales": {part: [_scale(kind, limit) for kind, limit in own.items()] for part, own in limits.items()},
    }


def _prompts(run: RunData) -> dict[str, Any] | None:
    """The table of prompts, with its counts as sentences."""
    table = prompt_table(run)
    if table is None:
        return None
    out = f"Left out after step {table.as_of}: {counts_in_words(table.left_out)}." if table.left_out else ""
    return {"table": table, "note": f"{tried_text(table)}. {groups_text(table)}. {out}".strip()}


def _curves(runs: Sequence[RunData]) -> dict[str, Any]:
    """Charts of the main metrics and of the others, and the keys without a chart."""
    main = main_metrics(runs)
    used = {key for _, key in main}
    for key in sorted(used):  # the extremes and the deviation of a metric are not charts of their own
        used |= {f"{key.removesuffix('/mean')}/{part}" for part in ("min", "max", "std")}
    rest = [key for key in sorted({key for run in runs for key in run.metrics}) if key not in used]
    return {
        "charts": [chart_of(runs, key, title) for title, key in main],
        "others": [chart_of(runs, key) for key in rest[:_OTHER_CHARTS]],
        "missing": rest[_OTHER_CHARTS:] + sorted({key for run in runs for key in run.undrawn}),
        "pass_at_k": pass_at_k_chart(runs),
    }


def _scale(kind: str, limit: float) -> dict[str, Any]:
    """The legend of a kind of shade: the class and value of each level, from the lowest."""
    levels = range(-LEVELS, LEVELS + 1) if kind == "advantage" else range(LEVELS + 1)
    sign = -1 if kind == "logp" else 1
    swatches = [(f"{kind[0]}{sign * n}", sign * level_value(n, limit, kind) + 0.0) for n in levels]
    return {"kind": kind, "swatches": swatches, "half": level_value(LEVELS // 2, limit, kind)}


def _style() -> str:
    text = (_TEMPLATES / "report.css").read_text(encoding="utf-8")
    dark = f"@media (prefers-color-scheme:dark){{:root{{{variables(DARK)}}}}}"
    fills = "".join(f".c{n}{{background:var(--line{n})}}" for n in range(COLOURS))
    return f":root{{{variables(LIGHT)}}}{dark}{text}{fills}{''.join(map(style_rules, KINDS))}"


def _show(value: Any) -> str:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return "-" if value is None else str(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) < 10**30 else shown(value)
    return f"{value:.4g}" if math.isfinite(value) else "-"
