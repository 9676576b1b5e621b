"""Hosts: one of two or four is killed; the others must end with one line that names it, and all resume bit by bit."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from experiments.attacks import SO_FAR, Outcome
from experiments.attacks.kills import PATIENCE
from experiments.attacks.tiny import differences, write_inputs, write_settings
from experiments.attacks.worker import ROOT, environment
from experiments.benchmarks.hosts import free_port
from jaxrl_llm.distributed.alive import LOST

BOUND = 60.0  # seconds after the death of a host in which the others must have ended
CONFIGURATION = "grpo"  # of `tiny`: six steps, evaluations and checkpoints among them


class Moment(NamedTuple):
    """When which host is killed: where it comes to a place of `host.PLACES` for the nth time, and a delay in seconds.

    place: also "temporary" and "complete": once the folder of checkpoint `nth` is there, under its temporary name, or
    its own.
    """

    hosts: int
    victim: int
    place: str
    nth: int = 1
    delay: float = 0.0

    @property
    def name(self) -> str:
        """For people."""
        after = f" + {self.delay} s" if self.delay else ""
        return f"host {self.victim} of {self.hosts}: {self.place} {self.nth}{after}"


# Each row is one run, which is killed at its moments, one after another, and then resumed to its end.
RUNS = (
    (Moment(2, 1, "join"),),
    (Moment(2, 0, "load", 1, 0.3),),
    (Moment(2, 1, "rollout", 3), Moment(2, 1, "restore")),
    (Moment(2, 0, "rewards", 2),),
    (Moment(2, 1, "update", 4, 0.05),),
    (Moment(2, 0, "evaluate", 2),),
    (Moment(2, 1, "save", 1),),
    (Moment(2, 0, "saving", 2),),
    (Moment(2, 1, "temporary", 4),),
    (Moment(2, 0, "temporary", 2, 0.05),),
    (Moment(2, 1, "leave"),),
    (Moment(4, 2, "join", 1, 0.5),),
    (Moment(4, 3, "load"),),
    (Moment(4, 0, "rollout", 2, 0.05),),
    (Moment(4, 1, "rewards", 5),),
    (Moment(4, 2, "exchange", 4), Moment(4, 0, "restore", 1, 0.1)),
    (Moment(4, 0, "update", 6),),
    (Moment(4, 3, "evaluate", 3, 0.05),),
    (Moment(4, 1, "saving", 1),),
    (Moment(4, 0, "temporary", 4),),
    (Moment(4, 2, "temporary", 6, 0.1),),
    (Moment(4, 0, "report"),),
    (Moment(4, 3, "complete", 2),),
)


class Host(NamedTuple):
    """A process, and what it printed. status: None where it did not end in time."""

    status: int | None
    err: str
    seconds: float = 0.0  # from the death of the victim to its end


class Cluster:
    """The hosts of one run on this machine, one CPU device each."""

    def __init__(self, arguments: Sequence[str], hosts: int, port: int, moment: Moment | None = None) -> None:
        self.errors = [tempfile.TemporaryFile("w+") for _ in range(hosts)]  # noqa: SIM115 (closed by `wait`)
        self.processes = []
        for index, err in enumerate(self.errors):
            inside = moment is not None and index == moment.victim and moment.place not in ("temporary", "complete")
            when = [moment.place, str(moment.nth), str(moment.delay)] if inside and moment else ["-", "1", "0"]
            join = ["--coordinator", f"localhost:{port}", "--processes", str(hosts), "--process", str(index)]
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "experiments.attacks.host", *when, *arguments, *join],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=err, text=True, cwd=ROOT,
                    env=environment(),
                )
            )  # fmt: skip

    def wait(self, seconds: float) -> list[Host]:
        """How the hosts have ended; those that have not in this time are killed."""
        begun, ended = time.monotonic(), dict[int, tuple[int | None, float]]()
        while len(ended) < len(self.processes) and time.monotonic() - begun < seconds:
            for index, process in enumerate(self.processes):
                if index not in ended and process.poll() is not None:
                    ended[index] = process.returncode, time.monotonic() - begun
            time.sleep(0.02)
        out = []
        for index, (process, err) in enumerate(zip(self.processes, self.errors, strict=True)):
            process.kill()
            process.wait()
            err.seek(0)
            status, took = ended.get(index, (None, seconds))
            out.append(Host(status, err.read(), took))
            err.close()
        return out


def _come(moment: Moment, victim: subprocess.Popen[str], run: Path) -> None:
    """Wait until the victim is dead, or kill it at a moment that is seen from outside; at most PATIENCE seconds."""
    until = time.monotonic() + PATIENCE
    pattern = {"temporary": f"{moment.nth}.*tmp*", "complete": str(moment.nth)}.get(moment.place)
    while victim.poll() is None and time.monotonic() < until:
        if pattern and list((run / "checkpoints").glob(pattern)):
            time.sleep(moment.delay)
            victim.kill()
            victim.wait()
        time.sleep(0.001)


def judge(hosts: Sequence[Host], moment: Moment) -> tuple[str, str]:
    """Whether the hosts ended as they should have after one was killed; the verdict, and what they said."""
    if hosts[moment.victim].status != -9:
        died = hosts[moment.victim]
        return "wrong", f"the moment did not come, status {died.status}: {' | '.join(died.err.splitlines()[-3:])}"
    said = ""
    for index, host in enumerate(hosts):
        if index == moment.victim:
            continue
        lines = [line for line in host.err.splitlines() if line.strip() and not SO_FAR.fullmatch(line)]
        said = f"host {index}, status {host.status}: {' | '.join(lines)}"
        if host.status is None:
            return "hang", said
        if host.status != LOST:
            return "wrong", said
        wanted = f"error: host {moment.victim} has shown no sign of life for 20 s; what is saved is good: jaxrl train "
        if len(lines) != 1 or not lines[0].startswith(wanted):
            return "unclear", said
    return "clear", said


class Runs:
    """Runs on so many hosts, in a folder, and one that nobody killed."""

    def __init__(self, folder: Path, hosts: int) -> None:
        self.hosts, self.folder = hosts, folder
        write_inputs(folder / "inputs")
        self.settings = write_settings(CONFIGURATION, folder / "inputs")
        self.reference = folder / "reference"
        self.finish(self.reference, free_port())

    def arguments(self, run: Path) -> list[str]:
        """To go on with a run, or to begin it where it has no configuration yet."""
        if (run / "config.json").exists():
            return ["train", "--resume", str(run)]
        return ["train", "--config", str(self.settings), "--output", str(run)]

    def finish(self, run: Path, port: int) -> None:
        """Start or resume a run, and see it end well. RuntimeError otherwise."""
        ended = Cluster(self.arguments(run), self.hosts, port).wait(PATIENCE)
        if wrong := [f"status {host.status}: {host.err[-500:]}" for host in ended if host.status != 0]:
            raise RuntimeError(" ".join(wrong[0].split()))

    def attack(self, number: int, moments: Sequence[Moment]) -> list[Outcome]:
        """Kill a run at these moments; one outcome each, the last with how it ended when resumed."""
        run, port, outcomes = self.folder / f"run-{number}", free_port(), list[Outcome]()
        for moment in moments:
            begun = time.monotonic()
            cluster = Cluster(self.arguments(run), self.hosts, port, moment)
            _come(moment, cluster.processes[moment.victim], run)
            verdict, said = judge(cluster.wait(BOUND), moment)
            outcomes.append(Outcome("hosts", moment.name, verdict, time.monotonic() - begun, said[:400]))
        try:
            self.finish(run, port)  # at the port of before, as a scheduler does that starts a job again
            wrong = differences(run, self.reference)
        except RuntimeError as error:
            wrong = f"resumed: {error}"
        if wrong:
            outcomes[-1] = outcomes[-1]._replace(verdict="wrong", said=wrong[:400])
        shutil.rmtree(run, ignore_errors=True)
        return outcomes


def run(runs: Sequence[Sequence[Moment]] = RUNS, workers: int = 2) -> list[Outcome]:
    """Make these runs, `workers` at once; one outcome for each kill."""
    with tempfile.TemporaryDirectory(prefix="jaxrl-hosts-") as name, ThreadPoolExecutor(workers) as pool:
        of = {count: Runs(Path(name) / str(count), count) for count in sorted({each[0].hosts for each in runs})}
        found = [pool.submit(of[each[0].hosts].attack, number, each) for number, each in enumerate(runs)]
        return [outcome for one in found for outcome in one.result()]
