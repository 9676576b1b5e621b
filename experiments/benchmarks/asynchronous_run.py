"""Seconds of a step of real runs against the simulation's: python experiments/benchmarks/asynchronous_run.py

Runs of a small model on eight devices, of which four sample where there is a bound above 0, with completions of a
log-normal tail. The clocks of `asynchronous.simulate` are those of each run: seconds of a decode step (of all rows,
whatever their number), and of all that the learner does in a step but wait. Sampler and learner slow each other down
where they share cores, which is in both clocks. What is compared is who waits for whom: seconds of a step, without the
first quarter of the steps, which fill the pipeline. Each run is made twice, and the second finds its programs compiled.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

import numpy as np

PROGRAM = """
from asyncio import gather

from jaxrl_llm.core.rollout import Rollout


async def program(tools, task):
    def limit(sample):
        normal = tools.random(f"length {sample}").normal()
        return max(1, min(task.limit, round(MEDIAN * 2.0 ** normal)))

    return await gather(*(tools.sample(task.prompt, number=i, limit=limit(i)) for i in range(task.samples)))


def tailed():
    return Rollout(program, "tailed")
"""


def run(folder: Path, model: str, bound: int, given: argparse.Namespace) -> list[dict[str, float]]:
    """The metrics of a run's steps."""
    from jaxrl_llm.training.config import OptimizerConfig, TrainConfig
    from jaxrl_llm.training.loop import train

    (folder / "rollout.py").write_text(PROGRAM.replace("MEDIAN", str(given.median)))
    (folder / "reward.py").write_text(
        "def even(completion_ids):\n    return [sum(t % 2 for t in ids) / len(ids) for ids in completion_ids]\n"
    )
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": f"number {i:03d}:"}) + "\n" for i in range(512)))
    config = TrainConfig(
        model=model, output=str(folder / f"run-{bound}"), prompts=str(folder / "rows.jsonl"),
        rewards=(f"{folder}/reward.py:even",), rollout=f"{folder}/rollout.py:tailed", steps=given.steps,
        prompts_per_step=given.groups, group_size=given.samples, max_new_tokens=8 * given.median,
        slots=given.slots or given.groups * given.samples, max_staleness=bound, sampler_devices=4 if bound else 0,
        mesh="data=4" if bound else "data=8", eval_size=0, checkpoint_every=0, log_completions_every=1,
        tensorboard=False, hyperparameters={"kl_coefficient": 0.0}, optimizer=OptimizerConfig(learning_rate=1e-4),
    )  # fmt: skip
    train(config)
    return [json.loads(line) for line in (folder / f"run-{bound}/metrics.jsonl").read_text().splitlines()]


def write_model(folder: Path) -> str:
    """The tiny model of the tests, with room for long completions."""
    shutil.copytree(Path(__file__).resolve().parents[2] / "tests/vectors/llama_tied", folder / "model")
    path = folder / "model/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 1024}))
    return str(folder / "model")


def lengths_of(folder: Path, bound: int, count: int) -> list[int]:
    """Lengths of the completions, in the order in which steps took them."""
    lines = (folder / f"run-{bound}/completions.jsonl").read_text().splitlines()
    return [len(one["tokens"]) for one in map(json.loads, lines) if one["phase"] == "train"][:count]


def main() -> None:
    """A line for each bound."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--bounds", type=int, nargs="+", default=[0, 1, 2, 4, 8])
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--median", type=int, default=24)
    parser.add_argument("--slots", type=int, default=0, help="rows that are decoded at once; 0: all of a step")
    given = parser.parse_args()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp()
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    from asynchronous import Machine, simulate

    rows, first = given.groups * given.samples, given.steps // 4
    print("staleness  s/step  simulated  ratio  decode ms  update s  waited s", flush=True)
    for bound in given.bounds:
        with tempfile.TemporaryDirectory() as name:
            model = write_model(Path(name))
            run(Path(name), model, bound, given)
            shutil.rmtree(Path(name, f"run-{bound}"))
            lines = run(Path(name), model, bound, given)
            lengths = lengths_of(Path(name), bound, rows * given.steps)
        late = lines[first:]
        seconds = [sum(x for name, x in line.items() if name.startswith("seconds/")) for line in late]
        waited = [line.get("seconds/groups" if bound else "seconds/sample", 0.0) for line in late]
        decoding = [line["sampler/decoding_seconds"] if bound else line["seconds/sample"] for line in late]
        decode = sum(decoding) / sum(line["rollout/steps"] for line in late)
        update = float(np.mean(seconds) - np.mean(waited))
        machine = Machine(decode, 0.0, update, 0.0, 0.0, given.slots or rows)
        found = simulate(machine, lengths, given.samples, given.groups, bound).seconds
        print(
            f"{bound:9d}  {np.mean(seconds):6.2f}  {found:9.2f}  {found / np.mean(seconds):5.2f}  {1e3 * decode:9.1f}"
            f"  {update:8.2f}  {np.mean(waited):8.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
