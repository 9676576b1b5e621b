"""Damages: a run with damaged files goes on as if nothing had been, or says what is wrong; nothing is lost."""

from __future__ import annotations

import hashlib
import json
import random
import re
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from experiments.attacks import Outcome
from experiments.attacks.damage_kinds import Kind, kinds
from experiments.attacks.kills import Runs
from experiments.attacks.tiny import CONFIGURATIONS, differences
from experiments.attacks.worker import Reply, Worker

LIMIT = 120.0  # seconds that a run may take, where one in good order takes one or two
# A run that goes on writes these again.
LIVE = ("metrics.jsonl", "completions.jsonl", "summary.json", "report.html", "environment.json")


class Case(NamedTuple):
    """One damage: of which kind, to what run, and the seed of the rest."""

    kind: Kind
    configuration: str
    base: str  # finished or interrupted
    seed: str


def draw(count: int, seed: int, configurations: Sequence[str]) -> list[Case]:
    """Damages of all kinds in turns, in an order that the seed gives; as many as that, or as there are kinds, at most
    once more than any other."""
    rng, known = random.Random(seed), [kind for kind in kinds() if set(kind.configurations) & set(configurations)]
    cases: list[Case] = []
    while len(cases) < count:
        rng.shuffle(known)
        for kind in known[: count - len(cases)]:
            where = rng.choice([name for name in kind.configurations if name in configurations])
            base = kind.base if kind.base != "both" else rng.choice(("finished", "interrupted"))
            cases.append(Case(kind, where, base, f"{seed} {len(cases)}"))
    return cases


def interrupt(run: Path) -> None:
    """Make a finished run one that was killed in its fifth step: as it would be, with half a line in its metrics."""
    for step in (5, 6):
        shutil.rmtree(run / "checkpoints" / str(step), ignore_errors=True)
    for name in ("metrics.jsonl", "completions.jsonl"):
        lines = (run / name).read_text().splitlines(keepends=True)
        text = "".join(line for line in lines if json.loads(line)["step"] <= 5)
        (run / name).write_text(text + '{"step": 6, "half')
    summary = json.loads((run / "summary.json").read_text())
    kept = {name: summary[name] for name in ("eval_before", "eval_latest")}
    (run / "summary.json").write_text(json.dumps(kept, indent=2) + "\n")


def contents(run: Path) -> dict[str, str]:
    """A hash of every file in a run's folder, by its path there; but not of its lock, which goes with its process."""
    return {
        str(path.relative_to(run)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(run.rglob("*"))
        if path.is_file() and not path.is_symlink() and path.name != "run.lock"
    }


def lost(before: dict[str, str], after: dict[str, str], refused: bool) -> str:
    """The first file that is not there any more, by its contents; it may have another place or name.

    Files that a run writes again may be others where it goes on. Where it was refused, all must be in their place.
    """
    there = Counter(after.values())
    for name, value in before.items():
        if name in LIVE and not refused:
            continue
        if (name in LIVE or name == "config.json") and after.get(name) != value:
            return f"{name} was changed"
        there[value] -= 1
        if there[value] < 0:
            return f"{name} is lost"
    return ""


def judge(kind: Kind, reply: Reply, gone: str, differs: str) -> tuple[str, str]:
    """The verdict over a run that was resumed, and what it said or what is wrong."""
    lines = [line for line in reply.err.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("error:")]
    said = " | ".join(lines)
    named = re.search(kind.names, reply.said, re.IGNORECASE) is not None
    if reply.status is None:
        return "hang", f"not ended after {LIMIT:.0f} s"
    if reply.status < 0 or "Traceback" in reply.err:
        at = next((i for i, line in enumerate(lines) if line.startswith("Traceback")), len(lines))
        return "unclear", f"status {reply.status}: {' | '.join([*lines[max(at - 1, 0) : at], *lines[at:][-3:]])}"
    if gone:
        return "wrong", f"{gone} (status {reply.status}: {said})"
    if reply.status == 2:
        if len(errors) != 1 or any(not line.startswith(("error:", "WARNING:")) for line in lines):
            return "unclear", f"not one line: {said}"
        if kind.refuse == "no":
            return "unclear", f"refused, although it could go on: {said}"
        return ("clear", said) if named else ("unclear", f"{kind.names} not named: {said}")
    if reply.status != 0:
        return "wrong", f"status {reply.status}: {said}"
    if kind.refuse == "must":
        return "silent" if not said else "wrong", f"accepted ({differs or 'the result is the same'}): {said}"
    if differs and not (kind.names and named):
        return "silent" if not said else "wrong", f"{differs}: {said}"
    return "clear", said


class Damaged:
    """Runs of one configuration to damage."""

    def __init__(self, name: str, folder: Path, worker: Worker) -> None:
        self.runs, self.folder, self.worker = Runs(name, folder, worker), folder, worker
        shutil.copytree(folder / "inputs", folder / "sound inputs")
        shutil.copytree(self.runs.reference, folder / "interrupted")
        interrupt(folder / "interrupted")

    def attack(self, case: Case) -> Outcome:
        """Damage a copy, resume it, judge it."""
        run, kind, begun = self.folder / "run", case.kind, time.monotonic()
        shutil.rmtree(run, ignore_errors=True)
        shutil.copytree(self.runs.reference if case.base == "finished" else self.folder / "interrupted", run)
        what = kind.do(run, random.Random(case.seed))
        name = f"{kind.name}, {case.configuration} {case.base}: {' '.join(what.split())}"
        try:
            verdict, said = self.resume(run, kind, [])
            if verdict == "clear" and kind.inputs:
                verdict, more = self.resume(run, kind, ["--accept-changed-inputs"])
                said = f"{said}; accepted: {more}"
        finally:
            shutil.rmtree(self.folder / "inputs")
            shutil.copytree(self.folder / "sound inputs", self.folder / "inputs")
        return Outcome("damages", name, verdict, time.monotonic() - begun, " ".join(said.split())[:500])

    def resume(self, run: Path, kind: Kind, options: list[str]) -> tuple[str, str]:
        """Go on with the run; the verdict, and why. With options it must be accepted, whatever its result."""
        before = contents(run)
        reply = self.worker.ask(["train", "--resume", str(run), *options], LIMIT)
        gone = lost(before, contents(run), reply.status == 2)
        if options:
            return judge(kind._replace(refuse="no"), reply, gone, "")
        differs = differences(run, self.runs.reference, kind.without) if reply.status == 0 else ""
        return judge(kind, reply, gone, differs)


def run(
    count: int = 200, seed: int = 0, workers: int = 2, configurations: Sequence[str] = ("grpo", "partial", "lora")
) -> list[Outcome]:
    """Damage and resume `count` runs of these configurations; one outcome each, in the order in which they are drawn.

    Each worker has a process of its own that resumes one run after another and is started again where it hangs.
    """
    if unknown := set(configurations) - CONFIGURATIONS.keys():
        raise ValueError(f"no such configurations: {sorted(unknown)}")
    cases = sorted(enumerate(draw(count, seed, configurations)), key=lambda pair: pair[1].configuration)
    outcomes: dict[int, Outcome] = {}

    def attack(part: list[tuple[int, Case]]) -> None:
        with tempfile.TemporaryDirectory(prefix="jaxrl-damages-") as folder, Worker() as worker:
            made: dict[str, Damaged] = {}
            for number, case in part:
                name = case.configuration
                if name not in made:
                    made[name] = Damaged(name, Path(folder) / name, worker)
                outcomes[number] = made[name].attack(case)

    share = -(-len(cases) // workers)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(attack, [cases[i : i + share] for i in range(0, len(cases), share)]))
    return [outcomes[number] for number in sorted(outcomes)]
