"""Train one configuration on one process and on several, and compare; and kill one of several, and resume.

    python experiments/benchmarks/hosts.py [--hosts 2 4] [--cases grpo ragged ...]   # tokens and parameters
    python experiments/benchmarks/hosts.py --kills 10                                # SIGKILL at random moments

Processes are those of `jaxrl train --coordinator ...` on this machine, with four simulated CPU devices in all. Tokens
must be the same and parameters equal to 1e-5; after kills, parameters must be the same bit by bit. Status 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]

from experiments.benchmarks.meshes import compare, make_inputs  # noqa: E402

DEVICES = 4
CASES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "ragged": {"prompts_per_step": 3, "mesh": "fsdp=4"},  # two prompts on one host, one on the other
    "dapo": {"algorithm": "dapo"},
    # Six groups of four: each of four hosts has slots for its two. With fewer, slots pass on to other groups.
    "oversample": {"oversample": 1.5, "slots": 32},
    "ppo": {"algorithm": "ppo", "mesh": "data=2,fsdp=2"},
    "lora": {"lora_rank": 4},
    # Heads on all devices: the hosts sample in lock-step, as one.
    "lockstep": {"mesh": "tensor=4", "oversample": 1.5},
    "units": {"mesh": "data=2,tensor=2", "oversample": 1.5, "slots": 24},  # with four hosts, two units of two
    "experts": {"mesh": "data=2,expert=2"},  # while sampling too; with four hosts, two units of two
}
MODELS = {"experts": "qwen3_moe"}  # folders of tests/vectors; the others are llama_tied
SETTINGS: dict[str, Any] = {
    "steps": 3, "prompts_per_step": 4, "group_size": 4, "max_new_tokens": 8, "eval_size": 4,
    "log_completions_every": 1, "checkpoint_every": 1, "tensorboard": False,
}  # fmt: skip


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return int(one.getsockname()[1])


def start(
    arguments: list[str], hosts: int, folder: Path, of_last: Sequence[str] = ()
) -> list[subprocess.Popen[str]]:  # fmt: skip
    """`jaxrl train` with these arguments on so many hosts; what each writes goes to files beside the run.

    of_last: further arguments of the last host.
    """
    port, out = free_port(), []
    for index in range(hosts):
        devices = DEVICES // hosts
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        join = ["--coordinator", f"localhost:{port}", "--processes", str(hosts), "--process", str(index)]
        join = join if hosts > 1 else []
        own = of_last if index == hosts - 1 else []
        command = [sys.executable, "-m", "jaxrl_llm.cli", "train", *arguments, *join, *own]
        log = (folder / f"host{index}.log").open("a")
        out.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log, text=True))
    return out


def config_file(folder: Path, name: str, options: dict[str, Any]) -> Path:
    """A configuration of a run into folder/name."""
    settings = {
        "model": str(folder / "model"), "prompts": str(folder / "prompts.jsonl"), "output": str(folder / name),
        "rewards": [f"{folder / 'rewards.py'}:even"], **SETTINGS, **options,
    }  # fmt: skip
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(settings))
    return path


def wait(processes: list[subprocess.Popen[str]], folder: Path, seconds: float = 600) -> list[int]:
    """The exit statuses. RuntimeError, with what was written, for one that is not 0."""
    statuses = [process.wait(seconds) for process in processes]
    if any(statuses):
        logs = "\n".join((folder / f"host{i}.log").read_text()[-2000:] for i in range(len(processes)))
        raise RuntimeError(f"{statuses}\n{logs}")
    return statuses


def result(folder: Path, name: str) -> dict[str, Any]:
    """Parameters and sampled tokens of a run."""
    import jax

    from jaxrl_llm.training.folder.load_run import load_run

    _, _, params, _ = load_run(str(folder / name))
    leaves = jax.tree_util.tree_leaves_with_path(params)
    rows = [json.loads(line) for line in (folder / name / "completions.jsonl").read_text().splitlines()]
    return {
        "params": {jax.tree_util.keystr(path): np.asarray(x) for path, x in leaves},
        "tokens": [row["tokens"] for row in rows],
        "metrics": [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()],
    }


def run(folder: Path, name: str, hosts: int, options: dict[str, Any]) -> dict[str, Any]:
    """A whole run on so many hosts, and its result."""
    wait(start(["--config", str(config_file(folder, name, options))], hosts, folder), folder)
    return result(folder, name)


def killed(
    folder: Path, name: str, options: dict[str, Any], seconds: float, which: int
) -> tuple[float, str] | None:  # fmt: skip
    """Start or resume a run on two hosts, and kill one after so many seconds.

    Returns the seconds until the other had ended, and its last line; None if the run was done before.
    """
    processes = begin(folder, name, options)
    time.sleep(seconds)
    if any(process.poll() is not None for process in processes):
        wait(processes, folder)
        return None
    processes[which].send_signal(signal.SIGKILL)
    since = time.monotonic()
    other = processes[1 - which]
    other.wait(90)
    lines = (folder / f"host{1 - which}.log").read_text().strip().splitlines()
    return time.monotonic() - since, lines[-1] if lines else ""


def begin(folder: Path, name: str, options: dict[str, Any]) -> list[subprocess.Popen[str]]:
    """Start a run on two hosts, or resume what there is of it."""
    begun = (folder / name / "config.json").exists()
    config = config_file(folder, name, options)
    return start(["--resume", str(folder / name)] if begun else ["--config", str(config)], 2, folder)


def kills(folder: Path, count: int, seed: int) -> int:
    """So many kills at random moments of runs of 12 steps; 1 if the end of one differs from that of an unbroken run."""
    options = {"steps": 12, "oversample": 1.5}
    began = time.monotonic()
    whole = run(folder, "whole", 2, options)
    lasting, chance = time.monotonic() - began, random.Random(seed)
    done, number, wrong = 0, 1, False
    while done < count:
        after, which = chance.uniform(2, lasting), chance.randrange(2)
        if (ended := killed(folder, f"run{number}", options, after, which)) is None:
            wrong |= differs(folder, number, whole)
            number += 1
            continue
        done += 1
        print(f"kill {done} of host {which} after {after:.0f} s: ended in {ended[0]:.0f} s: {ended[1]}", flush=True)
        wrong |= ended[0] > 60
    wait(begin(folder, f"run{number}", options), folder)
    return int(wrong | differs(folder, number, whole))


def differs(folder: Path, number: int, whole: dict[str, Any]) -> bool:
    """Whether a run that was killed ended otherwise than the unbroken one."""
    found = result(folder, f"run{number}")
    same = all((x == found["params"][name]).all() for name, x in whole["params"].items())
    same &= whole["tokens"] == found["tokens"]
    words = "is that of the unbroken run, bit by bit" if same else "DIFFERS from that of the unbroken run"
    print(f"the end of run {number} {words}", flush=True)
    return not same


def main() -> int:
    """Compare or kill, print what is found, and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--hosts", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES))
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if given.kills:
            make_inputs(folder)
            return kills(folder, given.kills, given.seed)
        print("| case | hosts | same tokens | parameters differ by | rewards differ by |\n|---|---|---|---|---|")
        for case in given.cases:
            place = folder / case
            place.mkdir()
            make_inputs(place, MODELS.get(case, "llama_tied"))
            one = run(place, "1", 1, CASES[case])
            for hosts in given.hosts:
                found = run(place, f"{hosts}", hosts, CASES[case])
                same, apart = compare(found, one)
                rewards = [[line["reward/mean"] for line in each["metrics"]] for each in (found, one)]
                of_rewards = float(np.abs(np.subtract(*rewards)).max())
                wrong += not same or apart > 1e-5 or of_rewards > 1e-6
                words = "yes" if same else "no"
                print(f"| {case} | {hosts} | {words} | {apart:.1e} | {of_rewards:.1e} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
