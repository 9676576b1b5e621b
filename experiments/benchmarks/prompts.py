"""Start `jaxrl train` on many prompts: seconds and peak memory until the first step's prompts are drawn.

    python experiments/benchmarks/prompts.py                      # 10 million rows, a tiny model
    python experiments/benchmarks/prompts.py --rows 100000 --model smollm2-135m

It writes sums ("What is 12345 + 678?") as JSON lines, as Parquet with row groups of 1,000 and of 1,048,576 rows, and,
with --array-record, as array_record. Each start is a process of its own, which reads the inputs, loads the model, makes
the source of batches and draws the prompts of two steps; the first row of the table is a start on 4,096 rows, which
are read into a list. Not measured: compiling and sampling, which do not depend on the number of prompts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK = 2**20


def blocks(rows: int) -> Iterator[tuple[list[str], list[str]]]:
    """Prompts and answers, a block at a time. All prompts differ."""
    for first in range(0, rows, BLOCK):
        numbers = range(first, min(first + BLOCK, rows))
        yield [f"What is {i} + {i % 997}?" for i in numbers], [str(i + i % 997) for i in numbers]


def write(folder: Path, rows: int, array_record: bool) -> list[Path]:
    """The files of the benchmark; those that are there already are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = folder / f"{rows}.jsonl"
    if not lines.exists():
        with lines.open("w") as file:
            for prompts, answers in blocks(rows):
                pairs = zip(prompts, answers, strict=True)
                file.write("".join(f'{{"prompt": "{prompt}", "answer": "{answer}"}}\n' for prompt, answer in pairs))
    paths = [lines]
    for group in (1000, BLOCK):
        paths.append(folder / f"{rows}-groups-of-{group}.parquet")
        if not paths[-1].exists():
            write_parquet(paths[-1], rows, group)
    if array_record:
        paths.append(folder / f"{rows}.array_record")
        if not paths[-1].exists():
            write_records(paths[-1], rows)
    return paths


def write_parquet(path: Path, rows: int, group: int) -> None:
    """A Parquet file with row groups of this many rows."""
    import pyarrow
    from pyarrow.parquet import ParquetWriter

    schema = pyarrow.schema({"prompt": pyarrow.string(), "answer": pyarrow.string()})
    with ParquetWriter(path, schema) as writer:
        for prompts, answers in blocks(rows):
            writer.write_table(pyarrow.table({"prompt": prompts, "answer": answers}, schema), row_group_size=group)


def write_records(path: Path, rows: int) -> None:
    """An array_record file of JSON objects."""
    from array_record.python.array_record_module import ArrayRecordWriter

    writer = ArrayRecordWriter(str(path), "group_size:1")
    for prompts, answers in blocks(rows):
        for prompt, answer in zip(prompts, answers, strict=True):
            writer.write(json.dumps({"prompt": prompt, "answer": answer}).encode())
    writer.close()


def start(prompts: str, rows: int, model: str, begin: float) -> dict[str, Any]:
    """The parts of a start in this process. begin: `time.time()` when the process was started."""
    from jaxrl_llm.rollouts.runtime.sources import draw_prompts, shuffled_epochs
    from jaxrl_llm.training.config import TrainConfig
    from jaxrl_llm.training.inputs import read_inputs

    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            model=model, output=f"{folder}/run", prompts=prompts, num_prompts=rows, rewards=("number_match",),
            max_new_tokens=32, tensorboard=False,
        )  # fmt: skip
        seconds = {"imports": time.time() - begin}
        with read_inputs(config) as inputs:
            seconds["inputs"] = time.time() - begin
            digests = inputs.digests
            from jaxrl_llm.training.setup import set_up

            parts, _, _ = set_up(config, inputs)
            seconds["set-up"] = time.time() - begin
            curriculum = shuffled_epochs(parts.prompts.rows, config.seed)
            state = curriculum.init()
            for step in range(2):
                ids, state, _ = draw_prompts(curriculum, parts.prompts, state, config.prompts_per_step)
                assert all(parts.prompts.ids[i] for i in ids)
                seconds[f"step {step}"] = time.time() - begin
    return {
        "rows": len(parts.prompts.rows), "seconds": seconds, "digest": digests["the prompts"],
        "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "processor": time.process_time(),
    }  # fmt: skip


def main() -> None:
    """Write the files, start on each, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--model", default="tests/vectors/llama_tied")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "jaxrl-prompts")
    parser.add_argument("--array-record", action="store_true")
    parser.add_argument("--start", nargs=2, metavar=("PATH", "TIME"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.start:
        path, begin = options.start
        print(json.dumps(start(path, options.rows, options.model, float(begin))))
        return
    paths = write(options.folder, options.rows, options.array_record)
    print("| prompts | rows | inputs (s) | first step (s) | processor (s) | second step (s) | memory (MB) |")
    print("|---|---|---|---|---|---|---|")
    for path, rows in [(paths[0], 4096), *((path, options.rows - 256) for path in paths)]:
        command = [sys.executable, __file__, "--rows", str(rows), "--model", options.model]
        command += ["--start", str(path), str(time.time())]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
        if done.returncode:
            sys.exit(done.stderr)
        found = json.loads(done.stdout.splitlines()[-1])
        at = found["seconds"]
        print(
            f"| {path.name} | {found['rows']:,} | {at['inputs']:.1f} | {at['step 0']:.1f} | "
            f"{found['processor']:.1f} | {at['step 1'] - at['step 0']:.2f} | {found['bytes'] / 1e6:.0f} |"
        )


if __name__ == "__main__":
    main()
