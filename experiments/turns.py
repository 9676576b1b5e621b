"""Methods that credit turns against GRPO, on the laboratory's tasks with environments: `python -m experiments.turns`.

Results come into `experiments/lab/turns`, and the table into `experiments/RESULTS.md`. What is there is kept; names of
tasks run only these, and --table only writes the table.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

METHODS = (
    "grpo",
    "srgpo",
    "ui_s1",
    "trloo",
    "poad",
    "gigpo",
    "hgpo",
    "salt",
    "multi_turn_recipe",
    "hiper",
)
TASKS = ("tool_first", "text_maze", "search")
FOLDER = Path(__file__).parent / "lab" / "turns"
BEGIN, END = "<!-- turns -->", "<!-- end of turns -->"


def run(tasks: tuple[str, ...]) -> None:
    """Run what the folder does not hold."""
    from jaxrl_llm.in_jax.settings import LabSettings
    from jaxrl_llm.lab.config import LabConfig
    from jaxrl_llm.lab.laboratory import run_lab

    # Critics learn ten times as fast as the policy, as in the code of `hiper` and `multi_turn_recipe`.
    settings = LabSettings(iterations=60, prompts=8, group_size=8, learning_rate=1e-3, critic_rate=10.0, exact=False)
    grid = {
        "kl_coefficient": (0.0,),
        "lam": (0.5,),  # poad, multi_turn_recipe
        "lam_turn": (0.5,),  # hiper
        # The rewards of turns are shares of 1 here, and those that these methods were made for are up to 1 each:
        "success": (1.0,), "most": (1,),  # multi_turn_recipe: not divided again
        "matched": (0.0,), "least_deviation": (0.0,),  # ui_s1: any reward is a match
    }  # fmt: skip
    config = LabConfig(METHODS, tasks, seeds=10, first_seed=100, grid=grid, settings=settings)
    run_lab(config, FOLDER, lambda text: print(text, flush=True))


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
            first, note = task if method == "grpo" else "", found[method].note
            name = f"{method} ({note})" if note else method
            lines.append(f"| {first} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run, and write the table."""
    if "--table" not in sys.argv:
        run(tuple(name for name in TASKS if name in sys.argv) or TASKS)
    page = Path(__file__).parent / "RESULTS.md"
    before, after = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after.split(END)[1]}")


if __name__ == "__main__":
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"
    )  # runs side by side, each on a core of its own
    main()
