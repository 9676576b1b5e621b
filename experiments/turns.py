"""Methods that credit turns against GRPO, on the laboratory's tasks with environments: `python -m experiments.turns`.

Results come into `experiments/lab/turns`, and the table into `experiments/RESULTS.md`. What is there is kept; names of
tasks and methods run only these, and --table only writes the table.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

METHODS = (
    "grpo",
    "trloo",
    "gigpo",
    "hgpo",
    "srgpo",
    "salt",
    "poad",
    "multi_turn_recipe",
    "g_ra",
    "grpo_tcr",
    "grpo_roc",
)
TASKS = ("tool_first", "text_maze", "search")
FOLDER = Path(__file__).parent / "lab" / "turns"
BEGIN, END = "<!-- turns -->", "<!-- end of turns -->"


def run(tasks: tuple[str, ...], methods: tuple[str, ...]) -> None:
    """Run what the folder does not hold."""
    from jaxrl_llm.in_jax.settings import LabSettings
    from jaxrl_llm.lab.config import LabConfig
    from jaxrl_llm.lab.laboratory import run_lab

    settings = LabSettings(iterations=60, prompts=8, group_size=8, learning_rate=1e-3, exact=False)
    grid = {"kl_coefficient": (0.0,)}
    run_lab(
        LabConfig(methods, tasks, seeds=6, grid=grid, settings=settings), FOLDER, lambda text: print(text, flush=True)
    )


def table() -> str:
    """Means over the seeds with standard errors; differences from GRPO in standard errors."""
    import numpy as np

    from jaxrl_llm.lab.outcome import from_json
    from jaxrl_llm.reporting.files import read_json

    value = read_json(FOLDER / "results.json")
    lines = [
        "| | method | return at the end | difference | mean of the curve | difference |",
        "|---|---|---|---|---|---|",
    ]
    for task in (name for name in TASKS if name in value["starts"]):
        found = {one.method: one for one in map(from_json, value["outcomes"]) if one.task == task}
        for method in (name for name in METHODS if name in found):
            cells = []
            for measure in ("final", "area"):
                own, other = found[method].measures[measure], found["grpo"].measures[measure]
                error, both = own.std(ddof=1) / len(own) ** 0.5, np.hypot(own.std(ddof=1), other.std(ddof=1))
                apart = (own.mean() - other.mean()) / (both / len(own) ** 0.5)
                cells += [f"{own.mean():.3f} ± {error:.3f}", "" if method == "grpo" else f"{apart:+.1f}"]
            first = task if method == "grpo" else ""
            lines.append(f"| {first} | {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run, and write the table."""
    if "--table" not in sys.argv:
        given = tuple(name for name in sys.argv[1:] if name in (*TASKS, *METHODS))
        run(tuple(n for n in given if n in TASKS) or TASKS, tuple(n for n in given if n in METHODS) or METHODS)
    page = Path(__file__).parent / "RESULTS.md"
    before, after = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after.split(END)[1]}")


if __name__ == "__main__":
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"
    )  # runs side by side, each on a core of its own
    main()
