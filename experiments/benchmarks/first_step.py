"""Seconds from the command to the first trained step, by phase, with a cold and a warm compilation cache.

    python experiments/benchmarks/first_step.py [--prompts-per-step 8] [--settings --no-remat ...]

Writes word problems into a JSONL file, and trains SmolLM2-135M on them with `jaxrl train` in a process of its own, once
with an empty compilation cache (of its own, too) and then `--repeats` times with what that left. A run is stopped by
SIGTERM when its first step is printed. Phases are what the console shows: until the model is loaded (Python's imports
and the checks), until the run starts (JAX's imports, the weights, the state), the evaluation before training, the first
step; compiling, or reading compiled programs, is part of these and is given beside them. The CPU seconds of the
process tell how long it would take on two cores that nothing else uses: at least half of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What begins the line that ends each phase.
PHASES = {
    "imports and checks": "loading ",
    "load": "grpo on ",
    "evaluate": "before training: ",
    "first step": "step 1/",
}


def write_problems(file: Path, rows: int) -> None:
    """Word problems in the shape of GSM8K."""
    draw = random.Random(0)
    with file.open("w") as out:
        for _ in range(rows):
            boxes, each, gone = draw.randint(2, 9), draw.randint(2, 20), draw.randint(1, 9)
            left = boxes * each - gone
            question = f"Mia has {boxes} boxes of {each} pencils and gives away {gone}. How many are left?"
            answer = f"{boxes} * {each} = {boxes * each}, {boxes * each} - {gone} = {left}\n#### {left}"
            out.write(json.dumps({"question": question, "answer": answer}) + "\n")


def cpu_seconds(process: int) -> float:
    """User and system time of a running process; Linux only, elsewhere NaN."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(") ")[2].split()
    except OSError:
        return float("nan")
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def first_step(folder: Path, name: str, arguments: list[str]) -> dict[str, float]:
    """Seconds of each phase of a run, of compilation, in all, and of CPU. RuntimeError if it ends before its step."""
    command = [sys.executable, "-u", "-m", "jaxrl_llm.cli", "train", "--prompts", "problems.jsonl", "--output", name]
    paths = [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "PYTHONPATH": os.pathsep.join(paths)}
    found, waiting = dict[str, float](), list(PHASES.items())
    began = last = time.perf_counter()
    with (
        (folder / f"{name}.err").open("w") as errors,
        subprocess.Popen(
            [*command, *arguments], cwd=folder, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            # A line that tells what a long phase is doing begins like the one of the step.
            ends = [at for at, (_, begin) in enumerate(waiting) if line.startswith(begin) and "elapsed" not in line]
            if line.startswith("step 1/") and "reward" in line:
                ends = [len(waiting) - 1]
            if not ends:
                continue
            now = time.perf_counter()
            found[waiting[ends[0]][0]], last = now - last, now
            waiting = waiting[ends[0] + 1 :]
            if not waiting:
                found |= {"all": now - began, "CPU": cpu_seconds(process.pid)}
                process.send_signal(signal.SIGTERM)
                break
        process.stdout.read()
    if waiting:
        raise RuntimeError((folder / f"{name}.err").read_text()[-2000:])
    row = json.loads((folder / name / "metrics.jsonl").read_text().splitlines()[0])
    spent = {"compiling": "seconds/compile", "sampling": "seconds/sample", "update": "seconds/update"}
    return found | {of: row[key] for of, key in spent.items()} | {"programs": row["compiles"]}


def main() -> None:
    """Print a line for each run, and the phases as columns."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--prompts-per-step", type=int, default=16)
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--new", type=int, default=32, help="new tokens of a completion")
    parser.add_argument("--eval-size", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=1, help="warm runs")
    parser.add_argument("--settings", nargs=argparse.REMAINDER, default=[], help="more options of jaxrl train (last)")
    given = parser.parse_args()
    arguments = [
        "--model", "smollm2-135m", "--rewards", "number_match", "--steps", "100", "--no-tensorboard",
        "--prompts-per-step", str(given.prompts_per_step), "--group-size", str(given.group_size),
        "--max-new-tokens", str(given.new), "--eval-size", str(given.eval_size), *given.settings,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_problems(folder / "problems.jsonl", 8 * given.prompts_per_step + given.eval_size)
        for at in range(1 + given.repeats):
            label = f"warm{at}" if at else "cold"
            found = first_step(folder, label, arguments)
            shown = "  ".join(f"{key} {value:.1f}" for key, value in found.items() if key != "programs")
            print(f"{label:6} {shown}  ({found['programs']:.0f} programs)", flush=True)


if __name__ == "__main__":
    main()
