"""The rollout benchmark's figures as Markdown."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

OURS = "jaxrl_llm"
Answer = dict[str, Any]


def rates(answers: Sequence[Answer]) -> list[float]:
    """Tokens a second of the repeats, without the one that warmed up."""
    return [answer["tokens"] / answer["seconds"] for answer in answers[1:]]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Median (least to greatest)."""
    return f"{median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def static_rows(result: Answer, bytes_per_second: float) -> list[str]:
    """Lines of the table, one a column. The ratio is of neighbours in time: repeat by repeat, then their median."""
    case, needed, columns = result["case"], result["needed"], result["columns"]
    ours = rates(columns[OURS]["answers"])
    lines = []
    for name, column in columns.items():
        answers = column["answers"]
        own, later = rates(answers), answers[1:]
        step = median((x["seconds"] - x["first_token"]) / max(x["steps_after"], 1) for x in later)
        share = (needed["weights"] + needed["cache"]) / max(step, 1e-9) / bytes_per_second
        ratio = "" if name == OURS else spread([a / b for a, b in zip(ours, own, strict=True)])
        cells = [
            f"{case['batch']} x ({case['prompt']} + {case['new']})",
            str(case["group"]),
            column["loaded"]["version"],
            f"{median(own):,.1f} ({max(own):,.1f})",
            f"{median(x['first_token'] for x in later):.3f}",
            f"{step * 1e3:.1f}",
            f"{share:.0%}",
            f"{max(x['peak_bytes'] for x in answers) / 1e6:,.0f}",
            f"{answers[0]['compiles']}, {sum(x['compiles'] for x in later)}",
            f"{answers[0]['seconds']:.1f}",
            ratio,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


STATIC_HEAD = [
    "| rows x (prompt + new) | rows a prompt | | tokens/s, median (best) | first token, s | decode step, ms "
    "| of bandwidth | peak memory, MB | compiles: first call, later | first call, s | ours / it, median (range) |",
    "|---|---|---|---|---|---|---|---|---|---|---|",
]


def tail_table(case: Answer, jobs: dict[str, list[Answer]]) -> list[str]:
    """Markdown of the long-tail job."""
    lines = [
        f"{case['count']} requests on {case['slots']} slots, prompts of {case['prompt']} tokens, log-normal limits: "
        f"median {case['median']:g} new tokens, the longest {case['longest']:g} times that.",
        "",
        "| | tokens/s, median (best) | occupancy | while requests waited | decode steps | compiles later |",
        "|---|---|---|---|---|---|",
    ]
    for how, answers in jobs.items():
        own, last = rates(answers), answers[-1]
        busy = "" if last["busy_occupancy"] is None else f"{last['busy_occupancy']:.1%}"
        lines.append(
            f"| {how} | {median(own):,.1f} ({max(own):,.1f}) | {last['occupancy']:.1%} | {busy} | {last['steps']} "
            f"| {sum(x['compiles'] for x in answers[1:])} |"
        )
    ratios = [a / b for a, b in zip(*map(rates, jobs.values()), strict=True)]
    return [*lines, "", f"continuous / static: {spread(ratios)}"]


def partial_table(case: Answer, jobs: dict[str, list[Answer]]) -> list[str]:
    """Markdown of the rounds that are cut short. Their rate counts all tokens drawn: those kept are used later."""
    lines = [
        f"{case['rounds']} rounds of {case['wanted']} completions on {case['slots']} slots; `enough` asks for "
        f"{case['asked']} and keeps the rest for the next round.",
        "",
        "| | completions/s, median | tokens drawn/s, median | occupancy | decode steps | of them with nobody waiting "
        "| tokens from earlier rounds |",
        "|---|---|---|---|---|---|---|",
    ]
    for how, answers in jobs.items():
        later, last = answers[1:], answers[-1]
        lines.append(
            f"| {how} | {median(x['finished'] / x['seconds'] for x in later):.2f} "
            f"| {median(x['drawn'] / x['seconds'] for x in later):,.1f} | {last['occupancy']:.1%} | {last['steps']} "
            f"| {last['tail_steps']} | {last['stale_share']:.1%} |"
        )
    drawn = [[x["drawn"] / x["seconds"] for x in answers[1:]] for answers in jobs.values()]
    ratios = [cut / wait for wait, cut in zip(*drawn, strict=True)]
    return [*lines, "", f"tokens drawn a second, enough / wait: {spread(ratios)}"]


def shared_table(case: Answer, figures: dict[str, Answer]) -> list[str]:
    """Markdown of what XLA says of shared prompts."""
    lines = [
        f"{case['rows']} rows, prompts of {case['prompt']} tokens, room for {case['new']} own tokens; by XLA's memory "
        "and cost analysis, nothing was run.",
        "",
        "| | prompt cache, MB | weights, prompts and own cache, MB | bytes accessed by a decode step, MB |",
        "|---|---|---|---|",
    ]
    names = {"shared": f"{case['groups']} prompts", "unshared": f"{case['rows']} prompts"}
    keys = ("cache_bytes", "argument_bytes", "step_bytes")
    for name, label in names.items():
        lines.append(f"| {label} | " + " | ".join(f"{figures[name][key] / 1e6:,.1f}" for key in keys) + " |")
    share = [figures["shared"][key] / figures["unshared"][key] for key in keys]
    return [*lines, "| ratio | " + " | ".join(f"{x:.1%}" for x in share) + " |"]


def machine() -> str:
    """The processor in words."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        named = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model na")]
        model = named[0] if named else model
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{model}, {cores} cores, Python {platform.python_version()}"
