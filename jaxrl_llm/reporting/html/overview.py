"""What a report says of each run, and of several side by side."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.reporting.html.curves import names_of
from jaxrl_llm.reporting.html.run_data import RunData
from jaxrl_llm.reporting.html.settings_shown import changed_settings, differing_settings
from jaxrl_llm.reporting.html.verdict import held_out, outcomes, verdict, warnings
from jaxrl_llm.reporting.statistics import paired_difference

Defaults = Callable[[Mapping[str, Any]], Mapping[str, Any]]


def overview(run: RunData, defaults: Defaults | None) -> dict[str, Any]:
    """What a report says of each run: the verdict, warnings, facts, evaluations and settings."""
    found = held_out(run)
    return {
        "name": run.name,
        "verdict": verdict(run, found),
        "warnings": warnings(run),
        "config": run.config,
        "summary": run.summary,
        "steps": len(run.steps),
        "changed": [] if defaults is None else changed_settings(run.config, defaults(run.config)),
        "facts": _facts(run),
    }


def _facts(run: RunData) -> list[tuple[str, str]]:
    """Numbers of a run that are worth a glance: start and end of reward, entropy and the share of uniform groups."""
    found = []
    for label, key in (
        ("reward", "reward/mean"),
        ("groups without signal", "groups/uniform"),
        ("entropy, nats", "entropy"),
        ("tokens a completion", "completion/length"),
    ):
        values = run.metric(key)
        if values.size:
            part = max(1, len(values) // 10)
            ends = values[:part].mean(), values[-part:].mean()
            found.append((label, " \u2192 ".join(f"{x:.0%}" if key == "groups/uniform" else f"{x:.3g}" for x in ends)))
    return found


def side_by_side(runs: Sequence[RunData], defaults: Defaults | None) -> dict[str, Any]:
    """The parts of a report that only several runs have: their settings and their results side by side."""
    return {
        "runs": [overview(run, defaults) for run in runs],
        "differing": differing_settings([run.config for run in runs]),
        "against": [against for run in runs[1:] if (against := _against(runs[0], run)) is not None],
    }


def _against(first: RunData, other: RunData) -> dict[str, Any] | None:
    """The held-out accuracy of two runs after training on the same prompts; None if they are not the same."""
    ends = [[row for row in run.rows if row.phase == "eval_after"] for run in (first, other)]
    found = outcomes(*ends)
    total = sum(found.counts)
    if not total or any(len({row.prompt_id for row in rows}) != total for rows in ends):
        return None
    texts = [
        {line["prompt_id"]: line.get("prompt") for line in run.read(rows).values()}
        for run, rows in zip((first, other), ends, strict=True)
    ]
    if texts[0] != texts[1]:
        return None
    difference, low, high, p = paired_difference(*found.counts)
    names = names_of([first, other])
    return {
        "names": names, "total": total, "only_first": found.counts[2], "only_other": found.counts[1],
        "change": f"{100 * difference:+.1f} points (95 % interval {100 * low:+.1f} to {100 * high:+.1f})",
        "p": "p < 0.001" if p < 0.001 else f"p = {p:.2g}", "significant": p < 0.05 and low * high > 0,
    }  # fmt: skip
