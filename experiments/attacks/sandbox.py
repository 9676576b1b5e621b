"""Programs against the sandbox, with four sets of layers, as root and as nobody: which promise is broken?

`guards` says what a set of layers keeps; what an attack gets beside that is counted, and clear. A promise that is
broken, a program that is wrongly credited, and a right one that is not, are wrong. This module as a program attacks one
set, as its user: it reads names of cases from stdin and writes outcomes.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from experiments.attacks import Outcome
from experiments.attacks.sandbox_holds import END, HOLD, MEMORY, RESOURCES
from experiments.attacks.sandbox_host import SITE, Host, named, resident, still_there
from experiments.attacks.sandbox_reaches import BEGIN, REACHES
from experiments.attacks.sandbox_rewards import HACKS, RIGHT
from experiments.attacks.sandbox_sessions import SESSIONS
from jaxrl_llm.environments.sandbox import LAYERS, Limits, Session, available, guards, run_code
from jaxrl_llm.rewards import code as rewards

ROOT = Path(__file__).resolve().parents[2]
SETS = {"all": LAYERS, **{f"without {one}": tuple(x for x in LAYERS if x != one) for one in LAYERS[:3]}}
NOBODY, SECONDS, MOST = 65534, 2.0, 25.0
LIMITS = Limits(seconds=SECONDS, memory=256, processes=8, output=100_000, disk=4)
KEPT, REACHED = "kept", "reached, which is not promised"


def cases() -> dict[str, Callable[[Sequence[str], Host, str], tuple[str, bool]]]:
    """For each name a function that attacks, and gives the promise and whether it was broken."""
    out: dict[str, Callable[[Sequence[str], Host, str], tuple[str, bool]]] = {}
    for promise, programs in REACHES.items():
        for name, code in programs.items():
            out[f"{promise}: {name}"] = partial(_reaches, promise, code)
    for promise, programs in (("memory", MEMORY), ("resources", RESOURCES), ("end", END)):
        for name, code in programs.items():
            out[f"{promise}: {name}"] = partial(_holds, promise, code)
    for promise, functions in SESSIONS.items():
        for name, attack in functions.items():
            out[f"{promise}: session: {name}"] = partial(_session, promise, attack)
    for name, (code, tests) in HACKS.items():
        out[f"wrongly credited: {name}"] = partial(_rewarded, "wrongly credited", code, tests, "")
    for name, (code, tests, needs) in RIGHT.items():
        out[f"not credited: {name}"] = partial(_rewarded, "not credited", code, tests, needs)
    return out


def _text(code: str, host: Host, mark: str, begin: str = BEGIN) -> str:
    return (begin + code).format(**host.targets, mark=mark)


def _reaches(promise: str, code: str, layers: Sequence[str], host: Host, mark: str) -> tuple[str, bool]:
    before = host.state()
    found = run_code(
        _text(code, host, mark), limits=LIMITS, layers=layers, weak=True, readable=[str(host.folder / "open")]
    )
    return promise, "out" in found.stdout or host.state() != before or host.reached()


def _holds(promise: str, code: str, layers: Sequence[str], host: Host, mark: str) -> tuple[str, bool]:
    begin = _text("", host, mark) + HOLD
    most, over, began = [0], threading.Event(), time.monotonic()

    def measure() -> None:
        while not over.wait(0.05):
            most[0] = max(most[0], resident(named(mark)))

    watcher = threading.Thread(target=measure)
    if "closed" in code or "os.close(" in code:
        watcher.start()
    found = run_code(begin + code.replace("{mark}", mark), limits=LIMITS, layers=layers, weak=True)
    over.set()
    seconds = time.monotonic() - began
    if watcher.ident is not None:
        watcher.join()
    if promise == "memory":
        return promise, max(found.stdout.count("x"), most[0] / 2**20) > 1.1 * LIMITS.memory
    if promise == "resources":
        long = max(len(found.stdout), len(found.stderr)) > LIMITS.output
        return promise, "out\n" in found.stdout or long or min(found.seconds, seconds) > SECONDS + 3
    return promise, bool(still_there(mark))


def _session(
    promise: str, attack: Callable[[Any, str], bool], layers: Sequence[str], host: Host, mark: str
) -> tuple[str, bool]:
    del host
    return promise, attack(lambda: Session(LIMITS, layers, True), mark)


def _rewarded(
    kind: str, code: str, tests: list[Any], needs: str, layers: Sequence[str], host: Host, mark: str
) -> tuple[str, bool]:
    del host, mark
    if (needs in ("processes", "metadata") and "namespaces" not in layers) or (needs == "numpy" and not SITE):
        return kind, False  # not promised
    readable = [SITE] if needs == "numpy" else []
    limits = Limits(seconds=2.0 if kind == "wrongly credited" else 20.0, memory=512, output=2**16)
    rewards.run_code = partial(run_code, layers=layers, weak=True, readable=readable)  # type: ignore[attr-defined]
    found = rewards.passed(code.replace("{site!r}", repr(SITE)), [rewards.case_of(one) for one in tests], limits)
    return kind, sum(found) > 0 if kind == "wrongly credited" else sum(found) < len(tests)


def attacked(layers: Sequence[str], names: Sequence[str]) -> Iterator[Outcome]:
    """The outcome of each case of these names."""
    known, promises = cases(), guards(layers)
    with tempfile.TemporaryDirectory(prefix="sandbox-host-") as place:
        temporary = Path(place, "tmp")
        temporary.mkdir()
        before, host = tempfile.tempdir, None
        for number, name in enumerate(names):
            tempfile.tempdir = str(temporary)
            if host is None:
                folder = Path(place, str(number))
                folder.mkdir()
                host = Host(folder)
            mark, began, said = f"sbx{os.getpid() % 10**6}_{number}", time.monotonic(), ""
            try:
                promise, broken = known[name](layers, host, mark)
            except Exception as error:  # an attack on the sandbox must not end in one
                promise, broken, said = name.partition(":")[0], True, f"{type(error).__name__}: {error}"
            seconds = time.monotonic() - began
            if broken:
                host.close()
                host = None
            if left := [*still_there(mark, 0.0 if promise == "end" else 1.0), *os.listdir(temporary)]:
                promise, broken, said = "end", True, f"left: {left[:3]}"
            for pid in named(mark):
                os.kill(pid, 9)
            tempfile.tempdir = before
            verdict = "hang" if seconds > MOST else "clear"
            if verdict == "clear" and broken and (promise in promises or "credited" in promise):
                verdict = "wrong"
            yield Outcome("sandbox", name, verdict, seconds, said or (REACHED if broken else KEPT))
        if host is not None:
            host.close()


def run(count: int | None = None, seed: int = 0, workers: int = 2) -> list[Outcome]:
    """Attack with `count` cases (None: all) in each set of layers that this system has, as root and as nobody.

    Without root: as oneself.
    """
    names = list(cases())
    if count is not None and count < len(names):
        chosen = set(random.Random(seed).sample(names, count))
        names = [name for name in names if name in chosen]
    sets = [name for name, layers in SETS.items() if set(layers) <= available()]
    users = [("root", 0), ("nobody", NOBODY)] if os.geteuid() == 0 else [("user", os.geteuid())]
    jobs = [(layers, *user) for layers in sets for user in users]
    with ThreadPoolExecutor(workers) as pool:
        return [outcome for part in pool.map(lambda job: _process(job, names), jobs) for outcome in part]


def _may_be_read(path: str) -> bool:
    """Whether other users may look into all folders of a path."""
    return all(folder.stat().st_mode & 0o001 for folder in Path(path).resolve().parents)


def _process(job: tuple[str, str, int], names: Sequence[str]) -> list[Outcome]:
    layers, user, number = job
    python = sys.executable
    if number != os.geteuid() and not _may_be_read(python):
        python = f"/usr/bin/python3.{sys.version_info[1]}"
    more: dict[str, Any] = {}
    if number != os.geteuid():
        path = os.pathsep.join([str(ROOT), *sys.path[1:]])
        more = {"user": number, "group": number, "extra_groups": []}
        more["env"] = {"PATH": os.environ["PATH"], "PYTHONPATH": path, "HOME": "/nonexistent"}
    process = subprocess.run(
        [python, "-m", "experiments.attacks.sandbox", layers], input=json.dumps(names), text=True, cwd=ROOT,
        stdout=subprocess.PIPE, check=False, **more,
    )  # fmt: skip
    found = [Outcome(*json.loads(line)) for line in process.stdout.splitlines()]
    out = [one._replace(name=f"{layers}, {user}: {one.name}") for one in found]
    if len(found) < len(names):
        out.append(
            Outcome("sandbox", f"{layers}, {user}: {names[len(found)]}", "wrong", 0.0, "the attacker was killed")
        )
    return out


def table(outcomes: Sequence[Outcome]) -> str:
    """For each set of layers and user: against how many programs a promise held, and how many reached something."""
    rows: dict[str, Counter[tuple[str, str]]] = {}
    for one in outcomes:
        who, promise, _ = (part.strip() for part in one.name.split(":", 2))
        state = "broken" if one.verdict != "clear" else "kept" if one.said == KEPT else "reached"
        rows.setdefault(who, Counter())[promise, state] += 1
    kinds = list(dict.fromkeys(promise for found in rows.values() for promise, _ in found))
    lines = [f"| layers, user | {' | '.join(kinds)} |", "|---" * (1 + len(kinds)) + "|"]
    for who, found in rows.items():
        cells = []
        for kind in kinds:
            kept, reached, broken = (found[kind, state] for state in ("kept", "reached", "broken"))
            if "credited" in kind:
                cells.append(f"{broken} of {kept + reached + broken}")
            else:
                more = [f"{reached} reached"] * bool(reached) + [f"**{broken} broken**"] * bool(broken)
                cells.append(", ".join([f"{kept} kept", *more]))
        lines.append(f"| {who} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    for outcome in attacked(SETS[sys.argv[1]], json.loads(sys.stdin.read())):
        print(json.dumps(outcome), flush=True)
