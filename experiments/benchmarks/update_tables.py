"""The update benchmark's figures as Markdown.

A result is {"case", "lines": {label: [answer of a process, one a round]}}; the first line is what the others are
compared with.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from rollout_tables import spread

Answer = dict[str, Any]


def seconds(run: Answer, name: str = "seconds") -> list[float]:
    """Of a process's repeats, without the first, which compiles."""
    return [answer[name] for answer in run["answers"][1:]]


def every(runs: Sequence[Answer], name: str = "seconds") -> list[float]:
    """Of all processes' repeats."""
    return [value for run in runs for value in seconds(run, name)]


def middle_and_best(values: Sequence[float], form: str, best: Callable[[Sequence[float]], float] = min) -> str:
    """Median (best)."""
    return f"{median(values):{form}} ({best(values):{form}})"


def peak(runs: Sequence[Answer]) -> int:
    """Bytes that any of the processes had at most."""
    return max(run["peak_bytes"] for run in runs)


def against(result: Answer, label: str) -> list[str]:
    """How many times as long, and as much memory, as the first line: of the rounds' medians, and of the peaks."""
    first = next(iter(result["lines"]))
    if label == first:
        return ["", ""]
    ours, runs = result["lines"][first], result["lines"][label]
    times = [median(seconds(b)) / median(seconds(a)) for a, b in zip(ours, runs, strict=True)]
    return [spread(times), f"{peak(runs) / peak(ours):.2f}"]


def firsts(runs: Sequence[Answer]) -> list[str]:
    """Seconds of the first call in each process, and how much was compiled in and after it."""
    answers = [run["answers"] for run in runs]
    later = sum(answer["compiles"] for each in answers for answer in each[1:])
    return [
        ", ".join(f"{each[0]['seconds']:.1f}" for each in answers),
        f"{answers[0][0]['compiles']}, {later}",
    ]


def row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def head(names: Sequence[str]) -> list[str]:
    return [row(names), "|" + "---|" * len(names)]


def step_table(result: Answer) -> list[str]:
    """Markdown of gradient steps. Utilisation is a share of the result's "flops_per_second"."""
    case, flops_per_second = result["case"], result["flops_per_second"]
    names = [
        "", "tokens/s, median (best)", "a step, s", "of peak", "peak memory, MB", "XLA: temporaries, all, MB",
        "first step of each process, s", "compiles: first, later", "gradient norm, first step",
        "time / first line's", "memory / first line's",
    ]  # fmt: skip
    lines = [
        f"A gradient step on {case['batch']} rows of {case['prompt']} + {case['new']} tokens; the peak is "
        f"{flops_per_second / 1e12:.3g} TFLOP/s.",
        "",
        *head(names),
    ]
    plain = next(iter(result["lines"].values()))[0]["flops"]  # what others need, for they share nothing
    for label, runs in result["lines"].items():
        times, memory = every(runs), runs[0].get("xla")
        flops, norm = runs[0].get("flops", plain), runs[0]["answers"][0].get("grad_norm")
        lines.append(row([
            label,
            middle_and_best([runs[0]["tokens"] / x for x in times], ",.1f", max),
            middle_and_best(times, ".3f"),
            f"{flops / median(times) / flops_per_second:.1%}",
            f"{peak(runs) / 1e6:,.0f}",
            f"{memory['temporaries'] / 1e6:,.0f}, {memory['whole'] / 1e6:,.0f}" if memory else "",
            *firsts(runs),
            "" if norm is None else f"{norm:.4g}",
            *against(result, label),
        ]))  # fmt: skip
    return lines


def iteration_table(result: Answer) -> list[str]:
    """Markdown of whole iterations."""
    case = result["case"]
    names = [
        "", "an iteration, s, median (best)", "sampling and rewards, s", "the rest, s", "new tokens/s",
        "peak memory, MB", "first iteration of each process, s", "compiles: first, later", "time / first line's",
        "memory / first line's",
    ]  # fmt: skip
    lines = [
        f"An iteration of GRPO: {case['prompts']} prompts x {case['samples']} samples, {case['new']} new tokens each.",
        "",
        *head(names),
    ]
    for label, runs in result["lines"].items():
        times, sampled = every(runs), every(runs, "sampled")
        lines.append(row([
            label,
            middle_and_best(times, ".2f"),
            f"{median(sampled):.2f}",
            f"{median(a - b for a, b in zip(times, sampled, strict=True)):.2f}",
            f"{runs[0]['tokens'] / median(times):,.1f}",
            f"{peak(runs) / 1e6:,.0f}",
            *firsts(runs),
            *against(result, label),
        ]))  # fmt: skip
    return lines


def fused_table(case: Answer, ways: dict[str, Answer]) -> list[str]:
    """Markdown of `fused_logprob` and the plain formula, which comes first."""
    lines = [
        f"Log-probabilities, entropy and gradients of {case['rows']} states of {case['hidden']} numbers, vocabulary "
        f"{case['vocabulary']}.",
        "",
        *head(["", "ms, median (best)", "temporaries, MB", "time / plain", "memory / plain", "gradients differ by"]),
    ]
    plain = ways["plain"]
    for label, way in ways.items():
        times = [a / b for a, b in zip(way["seconds"], plain["seconds"], strict=True)]
        lines.append(row([
            label,
            middle_and_best([1e3 * x for x in way["seconds"]], ".2f"),
            f"{way['temporaries'] / 1e6:,.1f}",
            "" if way is plain else spread(times),
            "" if way is plain else f"{way['temporaries'] / max(plain['temporaries'], 1):.3f}",
            "" if way is plain else f"{way['difference']:.1e}",
        ]))  # fmt: skip
    return lines
