"""Kills: runs that are killed or interrupted at some moment and resumed must end as one that was not, bit by bit."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from experiments.attacks import Outcome
from experiments.attacks.agents import AGENTS
from experiments.attacks.tiny import CONFIGURATIONS, STEPS, differences, write_inputs, write_settings
from experiments.attacks.worker import ROOT, Worker, environment
from jaxrl_llm.utils.process import PREEMPTED

PATIENCE = 300.0  # seconds until a moment must have come, or a run have ended
BOUND = 60.0  # seconds in which an interrupted run must have ended by itself, and its own processes after it
START, REPORT, STEP, AGENT_STEP = 9.0, 4.0, 0.06, 0.3  # seconds that these take, on a machine with nothing else to do
SOURCE = """import sys
from jaxrl_llm.cli.program import main
print("begun")
sys.exit(main(sys.argv[1:]))"""


class Moment(NamedTuple):
    """When a process is stopped, and how."""

    when: str  # start, step, checkpoint, final or report
    place: float  # 0 to 1: which of the steps that are left
    delay: float  # seconds after that
    how: str  # KILL, INT, INT INT (twice) or TERM


class Stopped(NamedTuple):
    """A process that was stopped. status: None where it did not end by itself; ended: it had, before the moment."""

    status: int | None
    ended: bool
    late: bool  # it was done, but for the end of its process
    err: str
    left: tuple[int, ...] = ()  # processes that it had started and that did not end with it
    done: bool = False  # it finished the run nevertheless


def draw(rng: random.Random, seconds: float = STEP) -> Moment:
    """A moment: one in two in a step, the others in a start, a checkpoint, the end or the report.

    seconds: that a step takes, on a machine with nothing else to do.
    """
    when = rng.choices(("step", "checkpoint", "start", "final", "report"), (50, 20, 12, 10, 8))[0]
    longest = {"start": START, "step": 2 * seconds, "checkpoint": STEP, "final": 6 * STEP, "report": REPORT}[when]
    how = rng.choices(("KILL", "INT", "INT INT", "TERM"), (70, 16, 7, 7))[0]
    return Moment(when, rng.random(), rng.uniform(0, longest), how)


class _Lines:
    """What a process has printed so far, read by a thread of its own, which may be waited for."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        self.closed = False
        self._news = threading.Condition()
        assert process.stdout is not None
        self._stream = process.stdout
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._stream:
            with self._news:
                self.lines.append(line)
                self._news.notify_all()
        with self._news:
            self.closed = True
            self._news.notify_all()

    def wait(self, pattern: str, deadline: float) -> str | None:
        """The first line with the pattern; None where the process ended without one, or it is too late."""
        with self._news:
            while True:
                if found := [line for line in self.lines if re.search(pattern, line)]:
                    return found[0]
                if self.closed or time.monotonic() > deadline:
                    return None
                self._news.wait(1.0)


def _come(moment: Moment, lines: _Lines, run: Path, process: subprocess.Popen[str]) -> bool:
    """Wait for the moment, without its delay; False where it does not come."""
    deadline = time.monotonic() + PATIENCE
    if moment.when == "start":
        return moment.how == "KILL" or lines.wait("^begun", deadline) is not None
    if moment.when == "report":
        return lines.wait("^after training:", deadline) is not None
    if lines.wait("^(before training|step)", deadline) is None:
        return False
    first = next((int(found[1]) for line in lines.lines if (found := re.search(r"from step (\d+)", line))), 0)
    if first == STEPS:  # a run that is resumed after its last step has only the end before it
        return True
    chosen = STEPS if moment.when == "final" else first + 1 + int(moment.place * (STEPS - first))
    if moment.when == "checkpoint":
        while process.poll() is None and time.monotonic() < deadline:
            tmp = [int(path.name.split(".")[0]) for path in (run / "checkpoints").glob("[0-9]*tmp*")]
            if any(step >= chosen for step in tmp):
                return True
            time.sleep(0.0005)
        return False
    return lines.wait(f"^step ({'|'.join(str(n) for n in range(chosen, STEPS + 1))})/", deadline) is not None


def _children(process: int) -> dict[int, str]:
    """The processes that a process started, and those that they did, with the moments at which they began."""
    parents: dict[int, tuple[int, str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            fields = path.read_text().rpartition(")")[2].split()
            if fields[0] != "Z":
                parents[int(path.parent.name)] = int(fields[1]), fields[19]
    found: dict[int, str] = {}
    while new := {pid: at for pid, (up, at) in parents.items() if up in (process, *found) and pid not in found}:
        found |= new
    return found


def _alive(processes: dict[int, str]) -> tuple[int, ...]:
    """Which of these are still there, and are the same."""
    there = []
    for pid, begun in processes.items():
        with suppress(OSError):
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            there += [pid] if fields[0] != "Z" and fields[19] == begun else []
    return tuple(there)


def stop(arguments: list[str], run: Path, moment: Moment) -> Stopped:
    """Start `jaxrl ARGUMENTS`, which works in the folder `run`, and stop it at the moment."""
    with tempfile.TemporaryFile("w+") as err:
        process = subprocess.Popen(
            [sys.executable, "-c", SOURCE, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=err,
            text=True, env=environment(), cwd=ROOT, start_new_session=True,
        )  # fmt: skip
        lines, status = _Lines(process), None
        came = _come(moment, lines, run, process)
        if came:
            time.sleep(moment.delay)
        ended, late = process.poll() is not None, any(line.startswith("report:") for line in lines.lines)
        children = _children(process.pid)
        try:
            if came and not ended:
                for number, name in enumerate(moment.how.split()):
                    if number:
                        time.sleep(moment.place)
                    if name == "INT":  # as a terminal does, to all processes of the group
                        os.killpg(process.pid, signal.SIGINT)
                    else:
                        process.send_signal(signal.Signals[f"SIG{name}"])
            status = process.wait(BOUND)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        deadline = time.monotonic() + BOUND
        while (left := _alive(children)) and time.monotonic() < deadline:
            time.sleep(0.05)
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        err.seek(0)
        done = lines.wait("^report:", time.monotonic()) is not None
        return Stopped(status, ended or not came, late, err.read(), left, done)


def judge_stop(stopped: Stopped, how: str) -> tuple[str, str]:
    """Whether the process ended as it should have; the verdict, and why it is not clear."""
    said = [line for line in stopped.err.splitlines() if line.strip()]
    if stopped.status is None:
        return "hang", f"not ended {BOUND:.0f} s after SIG{how}"
    if stopped.left:
        return "hang", f"{len(stopped.left)} processes of the run did not end with it after SIG{how}"
    if "Traceback" in stopped.err:
        at = next(i for i, line in enumerate(said) if "Traceback" in line)
        return "unclear", f"a traceback after SIG{how}: {' | '.join([*said[max(at - 1, 0) : at], *said[at:][-4:]])}"
    complete = stopped.done and stopped.status == 0  # the signal came while the last lines were printed
    if how.startswith("INT") and not complete and (stopped.status != 130 or len(said) != 1):
        return (
            "unclear" if stopped.status == 130 else "wrong",
            f"status {stopped.status}: {' | '.join(said) or 'silent'}",
        )
    # Before the run listens to it, SIGTERM ends the process at once.
    if how == "TERM" and not complete and stopped.status not in (-signal.SIGTERM, PREEMPTED):
        return "wrong", f"status {stopped.status} after SIGTERM"
    if how == "TERM" and stopped.status == PREEMPTED and len(said) != 1:
        return "unclear", f"status {PREEMPTED}: {' | '.join(said) or 'silent'}"
    return "clear", said[0] if said else ""


class Runs:
    """The runs of one configuration in a folder, with one that nobody stopped as the reference."""

    def __init__(self, name: str, folder: Path, worker: Worker) -> None:
        self.name, self.folder, self.worker = name, folder, worker
        self.attack_name, self.step = ("agents", AGENT_STEP) if name in AGENTS else ("kills", STEP)
        write_inputs(folder / "inputs")
        self.settings = write_settings(name, folder / "inputs")
        self.reference = folder / "reference"
        reply = worker.ask(self.arguments(self.reference), 4 * PATIENCE)
        if reply.status:
            raise RuntimeError(f"the run {name} to compare with ended with status {reply.status}: {reply.err}")

    def arguments(self, run: Path) -> list[str]:
        """To go on with a run, or to begin it where it has no configuration yet."""
        if (run / "config.json").exists():
            return ["train", "--resume", str(run)]
        return ["train", "--config", str(self.settings), "--output", str(run)]

    def judge(self, run: Path) -> tuple[str, str]:
        """Finish a copy of the run, as it was left, and compare it with the reference."""
        copy = self.folder / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        if run.exists():
            shutil.copytree(run, copy)
        _next_second(copy)
        reply = self.worker.ask(self.arguments(copy), PATIENCE)
        if reply.status is None:
            return "hang", "it did not end when it was resumed"
        if "Traceback" in reply.err:
            return "unclear", f"a traceback when it was resumed: {reply.err.strip().splitlines()[-1]}"
        if reply.status:
            return "wrong", f"resumed, status {reply.status}: {' '.join(reply.err.split())}"
        found = differences(copy, self.reference)
        return ("wrong", found) if found else ("clear", " ".join(reply.err.split()))

    def attack(self, seed: str) -> Iterator[Outcome]:
        """Stop one run after another, each up to three times, for ever."""
        rng, number = random.Random(seed), 0
        while True:
            number += 1
            run = self.folder / f"run-{number}"
            for again in range(rng.randint(1, 3)):
                moment = draw(rng, self.step)
                name = f"{self.name} {number}.{again + 1}: SIG{moment.how} in {moment.when}"
                begun = time.monotonic()
                stopped = stop(self.arguments(run), run, moment)
                if stopped.ended:
                    if stopped.status != 0:
                        said = f"ended by itself, status {stopped.status}: {' '.join(stopped.err.split())}"
                        yield Outcome(self.attack_name, name, "wrong", time.monotonic() - begun, said[:400])
                        break
                    continue
                verdict, said = ("clear", "") if stopped.late else judge_stop(stopped, moment.how)
                if verdict == "clear":
                    verdict, said = self.judge(run)
                yield Outcome(self.attack_name, name, verdict, time.monotonic() - begun, said[:400])
                if verdict != "clear":
                    break
            shutil.rmtree(run, ignore_errors=True)


def _next_second(run: Path) -> None:
    """Wait while event files of this very second are there: a new one would get the same name."""
    while list(run.glob(f"tensorboard/*tfevents.{int(time.time())}.*")):
        time.sleep(0.05)


def run(
    count: int = 100, seed: int = 0, workers: int = 2, names: Sequence[str] = tuple(CONFIGURATIONS)
) -> list[Outcome]:
    """Kill runs of these configurations `count` times in all, `workers` at once; one outcome for each kill.

    Each kill is judged alone: a copy of what it left is resumed and compared with a run that nobody stopped.
    """
    shares = [(name, len(range(i, count, len(names)))) for i, name in enumerate(names)]

    def attack(share: tuple[str, int]) -> list[Outcome]:
        name, wanted = share
        if not wanted:
            return []
        with tempfile.TemporaryDirectory(prefix="jaxrl-kills-") as folder, Worker() as worker:
            outcomes = Runs(name, Path(folder), worker).attack(f"{seed} {name}")
            return list(islice(outcomes, wanted))

    with ThreadPoolExecutor(workers) as pool:
        return [outcome for part in pool.map(attack, shares) for outcome in part]
