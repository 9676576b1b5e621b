"""Rollouts: tokens per second of this sampler and of other libraries in one run, side by side.

    python experiments/benchmarks/rollout.py --model FOLDER --batch 16 64 --prompt 64 --new 64 \\
           --transformers-python PYTHON --tunix-python PYTHON
    python experiments/benchmarks/rollout.py --batch --longtail --partial --shared        # no static cases

Every column of a static case runs in a separate process, so peak memory is per column. Repeats alternate between the
columns (ours, transformers, tunix, ours, ...), so that other load on the machine affects them all. Prompts are random
ids, no token ends a completion, temperature is 1.

of bandwidth = needed bytes of a decode step / its time / bandwidth of reading memory, where
    needed bytes = weights + 2 x layers x KV heads x head size x cache item size x
                   (distinct prompts x prompt length + rows x own tokens so far, on the average)
    time of a step = (seconds - seconds to the first token) / steps after it
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rollout_tables import OURS, STATIC_HEAD, machine, partial_table, shared_table, static_rows, tail_table

# JAX is imported by the columns' processes only: on an accelerator this one would take the memory from them.
HERE = Path(__file__).parent
Answer = dict[str, Any]


class Column:
    """A process of rollout_worker.serve. SystemExit with the last line that it wrote if it ends too early."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name = name
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__)
        offline = {"HF_HUB_OFFLINE": "1"} if name != OURS else {}
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            env=os.environ | offline,
        )  # fmt: skip

    def ask(self, task: str, **arguments: Any) -> Answer:
        """The answer to one task; returns when it is done."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"task": task, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.process.wait()
            self.log.seek(0)
            last = next((x for x in reversed(self.log.read().splitlines()) if x.strip()), "it said nothing")
            raise SystemExit(f"the column {self.name} ended at {task!r}: {last.strip()}")
        return json.loads(line)

    def __enter__(self) -> Column:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate()  # closes its input, at which it ends
        self.log.close()


Open = Callable[[], Column]


def interleaved(columns: Sequence[Column], repeats: int, task: str, cases: Sequence[Answer]) -> list[list[Answer]]:
    """Answers [column][repeat + 1]: one that warms up, then `repeats` of each in turn, every one with its own seed."""
    answers: list[list[Answer]] = [[] for _ in columns]
    for seed in range(repeats + 1):
        for column, case, to in zip(columns, cases, answers, strict=True):
            to.append(column.ask(task, **case, seed=seed))
    return answers


def static_case(openers: Sequence[Open], case: Answer, repeats: int) -> Answer:
    """All columns at one case: {"case", "needed", "columns": {name: {"loaded", "answers"}}}."""
    with ExitStack() as stack:
        columns, loaded = [], []
        for opener in openers:
            columns.append(stack.enter_context(opener()))
            loaded.append(columns[-1].ask("load"))
        if len(columns) > 1 and any(one["platform"] != "cpu" for one in loaded):
            raise SystemExit("other libraries are measured on the CPU: set JAX_PLATFORMS=cpu, or leave them out")
        needed = columns[0].ask("needed_bytes", **case)
        answers = interleaved(columns, repeats, "static", [case] * len(columns))
    figures = {
        column.name: {"loaded": one, "answers": every}
        for column, one, every in zip(columns, loaded, answers, strict=True)
    }
    return {"case": case, "needed": needed, "columns": figures}


def pair_of_jobs(opener: Open, task: str, hows: tuple[str, str], case: Answer, repeats: int) -> dict[str, list[Answer]]:
    """Two ways to do one job, turn by turn in one process."""
    with opener() as column:
        column.ask("load")
        answers = interleaved([column] * 2, repeats, task, [case | {"how": how} for how in hows])
    return dict(zip(hows, answers, strict=True))


def parse(arguments: list[str] | None) -> tuple[argparse.Namespace, list[Answer]]:
    """Options, and the static cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--model", default="smollm2-135m", help="folder, smollm2-135m, or random:qwen3-1.7b and the like"
    )
    parser.add_argument("--batch", type=int, nargs="*", default=[16], help="rows; none for no static case")
    parser.add_argument("--prompt", type=int, nargs="+", default=[64])
    parser.add_argument("--new", type=int, nargs="+", default=[64])
    parser.add_argument("--group", type=int, nargs="+", default=[1], help="rows that share a prompt")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument(
        "--cache-dtype", choices=("float32", "bfloat16", "int8"), help="of our column; default: --dtype"
    )
    parser.add_argument("--transformers-python", help="interpreter that has torch and transformers")
    parser.add_argument("--tunix-python", help="interpreter that has google-tunix")
    parser.add_argument("--bandwidth", type=float, help="of reading memory, GB/s; default: it is measured")
    parser.add_argument("--longtail", action="store_true", help="continuous against static batches, uneven lengths")
    parser.add_argument("--partial", action="store_true", help="rounds that stop early and keep what is unfinished")
    parser.add_argument("--requests", type=int, default=128, help="of a long-tail job or of a round")
    parser.add_argument("--asked", type=int, default=160, help="requests that a round with --partial begins")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--median", type=float, default=24, help="new tokens")
    parser.add_argument("--longest", type=float, default=16, help="times the median")
    parser.add_argument("--tail-prompt", type=int, default=32)
    parser.add_argument("--shared", action="store_true", help="memory and traffic of shared prompts, by XLA")
    parser.add_argument("--shared-prompt", type=int, default=1024)
    parser.add_argument("--shared-new", type=int, default=64)
    parser.add_argument("--json", type=Path, help="where all that was measured is written")
    options = parser.parse_args(arguments)
    peers = options.transformers_python or options.tunix_python
    if peers and not (Path(options.model) / "config.json").exists():
        parser.error("other libraries need --model to be a Hugging Face folder")
    if options.repeats < 1:
        parser.error("--repeats must be at least 1")
    if options.asked < options.requests:
        parser.error("--asked must be at least --requests")
    grid = itertools.product(options.batch, options.prompt, options.new, options.group)
    cases = [dict(zip(("batch", "prompt", "new", "group"), sizes, strict=True)) for sizes in grid]
    for case in cases:
        if min(case.values()) < 1 or case["new"] < 3 or case["batch"] % case["group"]:
            parser.error(f"no such case: {case}; new must be at least 3, and group divide batch")
    return options, cases


def openers_of(options: argparse.Namespace) -> list[Open]:
    """How to begin the processes of the columns, ours first."""
    common = ["--model", options.model, "--dtype", options.dtype]
    cache = ["--cache-dtype", options.cache_dtype] if options.cache_dtype else []
    openers = [lambda: Column(OURS, [sys.executable, str(HERE / "rollout_ours.py"), *common, *cache])]
    peers = {"transformers": options.transformers_python, "tunix": options.tunix_python}

    def peer(name: str, python: str) -> Open:
        return lambda: Column(name, [python, str(HERE / "rollout_peers.py"), "--peer", name, *common])

    return openers + [peer(name, python) for name, python in peers.items() if python]


def main(arguments: list[str] | None = None) -> None:
    options, cases = parse(arguments)
    openers = openers_of(options)
    measured: Answer = {"machine": machine(), "arguments": sys.argv[1:] if arguments is None else arguments}
    kept = f", cache {options.cache_dtype}" if options.cache_dtype else ""
    print(f"{measured['machine']}. {options.model}, {options.dtype}{kept}, {options.repeats} repeats.", flush=True)
    if cases:
        bytes_per_second = (options.bandwidth or 0) * 1e9
        if not bytes_per_second:
            with openers[0]() as column:
                bytes_per_second = column.ask("bandwidth")["bytes_per_second"]
        how = "as given" if options.bandwidth else "measured"
        print(f"Reading memory: {bytes_per_second / 1e9:.1f} GB/s, {how}.\n", flush=True)
        print("\n".join(STATIC_HEAD), flush=True)
        measured |= {"bytes_per_second": bytes_per_second, "static": []}
        for case in cases:
            measured["static"].append(static_case(openers, case, options.repeats))
            print("\n".join(static_rows(measured["static"][-1], bytes_per_second)), flush=True)
    tail = {"slots": options.slots, "median": options.median, "longest": options.longest}
    tail |= {"prompt": options.tail_prompt, "group": options.group[0]}
    if options.longtail:
        case = tail | {"count": options.requests}
        jobs = pair_of_jobs(openers[0], "long_tail", ("continuous", "static"), case, options.repeats)
        measured["long_tail"] = jobs
        print("", *tail_table(case, jobs), sep="\n", flush=True)
    if options.partial:
        case = tail | {"rounds": options.rounds, "wanted": options.requests, "asked": options.asked}
        jobs = pair_of_jobs(openers[0], "partial", ("wait", "enough"), case, options.repeats)
        measured["partial"] = jobs
        print("", *partial_table(case, jobs), sep="\n", flush=True)
    if options.shared:
        case = {"rows": 64, "groups": 4, "prompt": options.shared_prompt, "new": options.shared_new}
        with openers[0]() as column:
            column.ask("load")
            measured["shared"] = column.ask("shared", **case)
        print("", *shared_table(case, measured["shared"]), sep="\n", flush=True)
    if options.json:
        options.json.write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
