"""Plan five runs, from a notebook's chips to a pod, and print what each proposes: a line of a table for each.

    python experiments/plan/cases.py [--only 8b 70b] [--folder FILES]

Needs libtpu; no weights, no TPU. Each plan is a process of `jaxrl plan`, whose output stays in the folder. Status 1 if
one takes more than four minutes, proposes what does not fit, or differs from arithmetic in the bytes of parameters or
of the optimiser.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from by_hand import COUNTERS, by_hand

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = Path(__file__).parent
LIMIT = 240  # seconds
LONG = "--max-prompt-tokens 1024 --max-new-tokens 1024 --group-size 16 --eval-size 256 --steps 1000"
CASES = {
    "135m": ("smollm2-135m", "v5e:2x2", "--prompts-per-step 16"),
    "8b": ("qwen3-8b", "v5e:4x4", f"--prompts-per-step 16 {LONG}"),
    "70b": ("llama-3.1-70b", "v5p:4x4x4", f"--prompts-per-step 64 {LONG}"),
    "30b-a3b": ("qwen3-30b-a3b", "v6e:4x4", f"--prompts-per-step 16 {LONG}"),
    "8b-pod": ("qwen3-8b", "v5e:16x16", f"--prompts-per-step 64 {LONG}"),
}


def run(name: str, folder: Path) -> tuple[dict[str, Any], float]:
    """The plan of a case as JSON, and its seconds."""
    model, topology, options = CASES[name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    arguments = ["plan", "--topology", topology, "--model", str(CONFIGS / f"{model}.json"), "--json"]
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "jaxrl_llm.cli", *arguments, *options.split()], env=environment,
        capture_output=True, text=True,
    )  # fmt: skip
    seconds = time.perf_counter() - start
    (folder / f"{name}.json").write_text(done.stdout)
    (folder / f"{name}.err").write_text(done.stderr)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{name}: {done.stderr[-2000:]}")
    return json.loads(done.stdout), seconds


def line(name: str, found: dict[str, Any], seconds: float) -> tuple[str, bool]:
    """A line of the table, and whether all is as it must be."""
    model, topology, _ = CASES[name]
    plan, changes = found["changed_plan"] or found["plan"], found["changes"]
    said = " ".join(f"{key} {value}" for key, value in changes.items()) or "as given"
    if plan is None:
        return f"| {model} | {topology} | nothing fits | | | | {seconds:.0f} |", False
    sure, held = by_hand(CONFIGS / f"{model}.json", changes, plan["mesh"]), plan["held"]
    exact = (held["parameters"], held["frozen"]) == (sure.parameters, sure.frozen)
    exact = exact and 0 <= held["optimiser"] - sure.optimiser <= COUNTERS
    resources = ("compute", "memory", "links", "compiler", "scheduled")
    binds = max(plan["seconds"].items(), key=lambda each: max(each[1][k] for k in resources))
    good = found["fits"] and plan["fits"] and plan["compiled"] and exact and seconds < LIMIT
    tokens = plan["tokens"] / plan["iteration_seconds"]
    return (
        f"| {model} | {topology} | {said} | {plan['peak'] / 2**30:.2f} of {plan['usable'] / 2**30:.2f} | "
        f"{plan['iteration_seconds']:.3g} s, {tokens:,.0f} tokens/s | {binds[0]}, {binds[1]['binds']} | {seconds:.0f}"
        f"{'' if exact else ': bytes differ from arithmetic'} |"
    ), good


def main() -> int:
    """Plan the cases, print the table, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--folder", type=Path, default=Path("runs/plan"))
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    print("| model | chips | changes | GiB a device | an iteration, at least | binds | seconds to plan |")
    print("|---|---|---|---|---|---|---|", flush=True)
    wrong = 0
    for name in given.only:
        text, good = line(name, *run(name, given.folder))
        wrong += not good
        print(text, flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
