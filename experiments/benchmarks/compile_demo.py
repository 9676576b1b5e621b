"""CPU seconds that the demo spends in tracing, lowering and compiling, by program, from an empty cache.

    python experiments/benchmarks/compile_demo.py [--steps 9] [--seed 0] [--json FILE]

Runs `jaxrl demo` in a process of its own, with a cache of its own, and prints a line for each program: how often it
was compiled, its CPU seconds, and the steps after which it was compiled. Tracing and lowering are counted by the CPU
time of their thread, compiling by that of the process, because XLA compiles in threads: other processes change little.
The threads that run programs are left out, for one may still run while the next is compiled (Linux only).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PHASES = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
    "/jax/core/compile/backend_compile_duration": "compile",
}
SHOWN = 0.3  # seconds: programs that take less are one line together


def clock(phase: str) -> float:
    """CPU seconds: of this thread, or of all threads that compile for what runs in threads."""
    return time.process_time() - running() if phase == "compile" else time.thread_time()


def running() -> float:
    """CPU seconds of the threads in which XLA runs programs, to a hundredth."""
    found = 0.0
    for thread in Path("/proc/self/task").iterdir():
        try:
            name, _, rest = (thread / "stat").read_text().rpartition(")")
        except OSError:  # it has just ended
            continue
        if "XLAEigen" in name:
            user, system = rest.split()[11:13]
            found += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return found


class Record:
    """What listeners of JAX's events write down. A program that is made while another is traced counts by itself."""

    def __init__(self, metrics: Path) -> None:
        self.metrics, self.found = metrics, list[dict[str, Any]]()
        self.open = defaultdict[int, list[list[float]]](list)  # by thread: begin, and seconds of what lies within

    def begin(self, event: str, value: float, **_: Any) -> None:
        if (phase := PHASES.get(event)) is not None:
            self.open[threading.get_ident()].append([clock(phase), 0.0])

    def end(self, event: str, seconds: float, fun_name: str = "", **_: Any) -> None:
        if (phase := PHASES.get(event)) is None:
            return
        stack = self.open[threading.get_ident()]
        began, inner = stack.pop()
        spent = clock(phase) - began
        if stack:
            stack[-1][1] += spent
        name = fun_name.removeprefix("jit_").removeprefix("jit(").removesuffix(")")
        steps = len(self.metrics.read_text().splitlines()) if self.metrics.exists() else 0
        self.found.append({"name": name, "phase": phase, "cpu": spent - inner, "wall": seconds, "after": steps})


def work(output: Path, arguments: list[str]) -> int:
    """Run the demo here and write what was recorded."""
    import jax

    record = Record(output / "run" / "metrics.jsonl")
    jax.monitoring.register_scalar_listener(record.begin)
    jax.monitoring.register_event_duration_secs_listener(record.end)
    from jaxrl_llm.cli.program import main

    status = main(["demo", "--output", str(output / "run"), *arguments])
    found = {"events": record.found, "process": time.process_time()}
    (output / "events.json").write_text(json.dumps(found))
    return status


def table(events: list[dict[str, Any]], least: float = SHOWN) -> str:
    """A line for each program, the longest first, and their sum."""
    rows: dict[str, dict[str, Any]] = {}
    for event in events:
        row = rows.setdefault(event["name"], {"count": 0, "trace": 0.0, "lower": 0.0, "compile": 0.0, "after": set()})
        row[event["phase"]] += event["cpu"]
        if event["phase"] == "compile":
            row["count"] += 1
            row["after"].add(event["after"])

    def total(row: dict[str, Any]) -> float:
        return row["trace"] + row["lower"] + row["compile"]

    lines = ["| program | count | trace | lower | compile | all | after step |", "|---|---|---|---|---|---|---|"]

    def line(name: str, chosen: list[dict[str, Any]]) -> str:
        sums = [sum(row[key] for row in chosen) for key in ("trace", "lower", "compile")]
        after = ", ".join(map(str, sorted(set[int]().union(*(row["after"] for row in chosen)))))
        count = sum(row["count"] for row in chosen)
        return f"| {name} | {count} | " + " | ".join(f"{x:.2f}" for x in (*sums, sum(sums))) + f" | {after} |"

    ordered = sorted(rows.items(), key=lambda item: -total(item[1]))
    lines += [line(name, [row]) for name, row in ordered if total(row) >= least]
    if small := [row for _, row in ordered if total(row) < least]:
        lines.append(line(f"{len(small)} others", small))
    return "\n".join([*lines, line("all", list(rows.values()))])


def main() -> int:
    """Run the demo with an empty cache, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=float, default=SHOWN, help="CPU seconds of a program that has its own line")
    parser.add_argument("--json", type=Path, help="where to write every event")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    arguments = ["--steps", str(given.steps), "--seed", str(given.seed)]
    if given.work is not None:
        sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
        return work(given.work, arguments)
    with tempfile.TemporaryDirectory() as name:
        environment = {**os.environ, "XDG_CACHE_HOME": f"{name}/cache", "JAX_CPU_ENABLE_ASYNC_DISPATCH": "false"}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        environment["PYTHONPATH"] = os.pathsep.join(
            [str(ROOT), str(ROOT / "kernels"), *filter(None, [os.environ.get("PYTHONPATH")])]
        )
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-u", __file__, "--work", name, *arguments], env=environment, check=True, stdout=sys.stderr
        )
        found = json.loads((Path(name) / "events.json").read_text())
        if given.json is not None:
            given.json.write_text(json.dumps(found))
    print(table(found["events"], given.least))
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3
    took = time.perf_counter() - began
    print(f"the run: {found['process']:.0f} CPU seconds, {took:.0f} s, at most {peak:,.0f} MB of memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
