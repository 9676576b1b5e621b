"""Methods that credit turns against GRPO, on the laboratory's tasks with environments: `python -m experiments.turns`.

Results come into `experiments/lab/turns`, and the table into `experiments/RESULTS.md`. What is there is kept; names of
tasks run only these, --again runs GRPO and GiGPO with ten more seeds, and --table only writes the table.
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
TASKS = ("tool_first", "text_maze")
FOLDER = Path(__file__).parent / "lab" / "turns"
# Other seeds: an earlier table, of other critics; and GRPO and GiGPO on one task again.
OTHERS = (FOLDER.parent / "turns_before", FOLDER.parent / "turns_again")
BEGIN, END = "<!-- turns -->", "<!-- end of turns -->"


def run(tasks: tuple[str, ...], methods: tuple[str, ...], folder: Path, first_seed: int) -> None:
    """Run what the folder does not hold."""
    from jaxrl_llm.in_jax.lab.config import LabConfig, grid_parameters
    from jaxrl_llm.in_jax.lab.laboratory import run_lab
    from jaxrl_llm.in_jax.settings import LabSettings

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
    known = set().union(*map(grid_parameters, methods))
    grid = {name: values for name, values in grid.items() if name in known}
    config = LabConfig(methods, tasks, seeds=10, first_seed=first_seed, grid=grid, settings=settings)
    run_lab(config, folder, lambda text: print(text, flush=True))


def table() -> str:
    """Means over the seeds with standard errors; differences from GRPO in standard errors, the last with the seeds of
    `OTHERS` too, where a method had the same settings."""
    import numpy as np

    from jaxrl_llm.in_jax.lab.outcome import RunOutcome, from_json
    from jaxrl_llm.reporting.logging.files import read_json

    def outcomes(folder: Path) -> dict[tuple[str, str], RunOutcome]:
        found = read_json(folder / "results.json") or {"outcomes": []}
        return {(one.task, one.method): one for one in map(from_json, found["outcomes"])}

    def apart(own: np.ndarray, other: np.ndarray) -> str:
        return f"{(own.mean() - other.mean()) / (np.hypot(own.std(ddof=1), other.std(ddof=1)) / len(own) ** 0.5):+.1f}"

    now, others = outcomes(FOLDER), [outcomes(folder) for folder in OTHERS]
    lines = [
        "| | method | return at the end | difference | mean of the curve | difference | at the end, all seeds |",
        "|---|---|---|---|---|---|---|",
    ]
    for task, method in ((task, method) for task in TASKS for method in METHODS if (task, method) in now):
        mine, base, cells = now[task, method], now[task, "grpo"], []
        for measure in ("final", "area"):
            own, other = mine.measures[measure], base.measures[measure]
            cells.append(f"{own.mean():.3f} ± {own.std(ddof=1) / len(own) ** 0.5:.3f}")
            cells.append("" if mine is base else apart(own, other))
        more = [found for found in others if (task, method) in found and found[task, method].point == mine.point]
        if more and mine is not base:
            own, other = (
                np.concatenate([one.measures["final"], *(found[task, name].measures["final"] for found in more)])
                for name, one in ((method, mine), ("grpo", base))
            )
            cells.append(f"{apart(own, other)} ({len(own)})")
        else:
            cells.append("")
        name = f"{method} ({mine.note})" if mine.note else method
        lines.append(f"| {task if mine is base else ''} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Run, and write the table."""
    if "--table" not in sys.argv:
        if "--again" in sys.argv:
            run(("tool_first",), ("grpo", "gigpo"), OTHERS[1], 110)
        else:
            run(tuple(name for name in TASKS if name in sys.argv) or TASKS, METHODS, FOLDER, 100)
    page = Path(__file__).parent / "RESULTS.md"
    before, after = page.read_text().split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n{table()}\n{END}{after.split(END)[1]}")


if __name__ == "__main__":
    os.environ.setdefault(
        "XLA_FLAGS", "--xla_force_host_platform_device_count=2 --xla_cpu_multi_thread_eigen=false"
    )  # runs side by side, each on a core of its own
    main()
