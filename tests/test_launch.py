"""The launch recipes: the exact commands that they would run, and the local launcher for real."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.launch import local
from jaxrl_llm.utils.process import PREEMPTED

FOLDER = Path(local.__file__).parent
TRAIN = ["jaxrl", "train", "--prompts", "a b.jsonl", "--output", "gs://bucket/a"]
GOES_ON = ["--distributed", "auto", "--resume", "auto"]


def dry_run(script: str, *options: str) -> list[str]:
    """The lines that a script prints."""
    command = ["bash", str(FOLDER / script), *options, "--dry-run", "--", *TRAIN]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.parametrize("script", sorted(path.name for path in FOLDER.glob("*.sh")))
def test_scripts_are_sound_and_refuse_what_they_do_not_know(script: str) -> None:
    subprocess.run(["bash", "-n", str(FOLDER / script)], check=True)
    for options in (["--nodse", "2"], []):
        done = subprocess.run(["bash", str(FOLDER / script), *options], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1


def test_slurm() -> None:
    first, *job, last = dry_run("slurm.sh", "--nodes", "2", "--gpus", "4", "--partition", "p")
    options = shlex.split(first.removesuffix(" <<'JOB'"))
    assert options[0] == "sbatch"
    wanted = {
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=4",
        "--partition=p",
        "--requeue",
        "--signal=TERM@120",
    }
    assert wanted <= set(options)
    assert last == "JOB"
    assert job[:2] == ["#!/usr/bin/env bash", "export JAX_LOCAL_DEVICE_IDS=0,1,2,3"]
    started = shlex.split(job[3].removesuffix(" || status=$?"))
    assert started == ["srun", "--kill-on-bad-exit=0", "--wait=120", *TRAIN, *GOES_ON]
    assert f"== {PREEMPTED} ]]; then scontrol requeue" in job[4]


def test_tpu_vm() -> None:
    lines = dry_run("tpu_vm.sh", "--name", "n", "--zone", "z", "--type", "v5litepod-16", "--spot", "--project", "p")
    create, archive, copy, install, train, delete = map(shlex.split, lines)
    gcloud = ["gcloud", "compute", "tpus", "tpu-vm"]
    assert create[:7] == [*gcloud, "create", "n", "--zone=z"]
    assert {"--project=p", "--accelerator-type=v5litepod-16", "--spot"} <= set(create)
    assert archive[:2] == ["git", "archive"]
    for command in (copy, install, train):
        assert "--worker=all" in command
    assert "pip install" in install[-1]
    assert shlex.split(train[-1].removeprefix("--command=cd jaxrl_llm && exec .venv/bin/")) == [*TRAIN, *GOES_ON]
    assert delete[:6] == [*gcloud, "delete", "n"]


def test_gke() -> None:
    (line,) = dry_run("gke_xpk.sh", "--cluster", "c", "--type", "v5litepod-16", "--slices", "2", "--image", "i")
    xpk = shlex.split(line)
    assert xpk[:7] == ["xpk", "workload", "create", "--cluster", "c", "--workload", "jaxrl"]
    assert {"--num-slices=2", f"--restart-on-exit-codes={PREEMPTED}", "--docker-image=i"} <= set(xpk)
    assert xpk[-2] == "--command"
    assert shlex.split(xpk[-1]) == ["exec", *TRAIN, *GOES_ON]


def test_local_commands(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", "--xla_a=1")
    assert local.main(["--processes", "2", "--devices", "3", "--port", "77", "--dry-run", "--", *TRAIN]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    for process, line in enumerate(lines):
        assert "XLA_FLAGS=--xla_a=1 --xla_force_host_platform_device_count=3" in line
        own = ["--coordinator", "localhost:77", "--processes", "2", "--process", str(process)]
        assert line[-len(TRAIN) - len(own) :] == [*TRAIN, *own]
    assert local.environment("cuda", 1, 2)["JAX_LOCAL_DEVICE_IDS"] == "2,3"


# Sums the devices' process numbers over all of them.
PROGRAM = """
import argparse
parser = argparse.ArgumentParser()
for name in ("coordinator", "processes", "process"):
    parser.add_argument("--" + name, type=str if name == "coordinator" else int)
args = parser.parse_args()
import jax
jax.distributed.initialize(args.coordinator, args.processes, args.process)
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
mesh = jax.make_mesh((4,), ("data",))
mine = np.full(2, args.process + 1.0)
x = jax.make_array_from_process_local_data(NamedSharding(mesh, PartitionSpec("data")), mine)
print(len(jax.devices()), float(jax.jit(lambda x: x.sum())(x)))
"""


@pytest.mark.heavy
def test_a_distributed_program_runs_on_this_machine(capfd: pytest.CaptureFixture[str]) -> None:
    assert local.main(["--processes", "2", "--devices", "2", "--", sys.executable, "-c", PROGRAM]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert sorted(line for line in lines if line.endswith("6.0")) == ["[0] 4 6.0", "[1] 4 6.0"]


WAITS = """
import signal, sys, time
process = int(sys.argv[-1])
def end(number, frame):
    print("heard", flush=True)
    sys.exit(75)
signal.signal(signal.SIGTERM, end)
print("ready", flush=True)
if process == 1 and sys.argv[1] == "fails":
    sys.exit(3)
time.sleep(60)
"""


def test_when_one_process_fails_the_others_end() -> None:
    done = subprocess.run(
        [sys.executable, str(FOLDER / "local.py"), "--", sys.executable, "-c", WAITS, "fails"],
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 3


def test_sigterm_is_passed_on_and_the_status_is_theirs() -> None:
    command = [sys.executable, str(FOLDER / "local.py"), "--", sys.executable, "-uc", WAITS, "waits"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    ready = {process.stdout.readline() for _ in range(2)}
    assert ready == {"[0] ready\n", "[1] ready\n"}
    process.send_signal(signal.SIGTERM)
    assert set(process.stdout.read().splitlines()) == {"[0] heard", "[1] heard"}
    assert process.wait() == PREEMPTED
