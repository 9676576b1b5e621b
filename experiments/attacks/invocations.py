"""Malformed invocations of the command line: each row of the table is a process with a verdict."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NamedTuple

from experiments.attacks import SO_FAR, Outcome
from experiments.attacks.table import FLAGS, MODEL, OPTIONS, Row, arguments_of, make_files, read_table, replaced

ROOT = Path(__file__).resolve().parents[2]
MEMORY = 4 * 2**30  # bytes that a command and its children may hold
LOCK = "run.lock"
LONGEST = 600  # characters of an error that is still one line to read
# What the fixtures need beyond the tiny run of the table: two checkpoints, and something held out.
FIXTURE = (
    *("--steps", "2", "--checkpoint-every", "1", "--eval-size", "2", "--log-completions-every", "1"),
    *("--optimizer.learning-rate", "0.002"),
)


class Ended(NamedTuple):
    """How a process ended."""

    status: int | None  # None: it was ended at a limit
    seconds: float
    output: str
    errors: str
    limit: str = ""  # which limit it went over


def run(
    table: Sequence[Row] | None = None, names: Iterable[str] | None = None, workers: int = 2, limit: float = 60.0
) -> list[Outcome]:
    """Run the rows (all of invocations.jsonl, or those of these names) in processes; outcomes in their order.

    Each process has a folder of its own, no standard input, and at most `limit` seconds and 4 GiB. Rows that need
    finished runs share two, which are made first, and get copies. ValueError for a name that is not in the table;
    RuntimeError where the runs to copy could not be made.
    """
    rows = list(read_table() if table is None else table)
    if names is not None:
        wanted = set(names)
        if missing := wanted - {row["name"] for row in rows}:
            raise ValueError(f"no such rows: {sorted(missing)}")
        rows = [row for row in rows if row["name"] in wanted]
    with tempfile.TemporaryDirectory(prefix="jaxrl-attack-") as scratch:
        places = {"MODEL": MODEL, "LONG": Path("x" * 5000)} | make_runs(rows, Path(scratch))
        with ThreadPoolExecutor(workers) as pool:
            return list(pool.map(lambda row: attempt(row, Path(scratch), places, limit), rows))


def make_runs(rows: Sequence[Row], scratch: Path) -> dict[str, Path]:
    """The finished runs that the rows name, by placeholder."""
    places = {}
    asked = repr(rows)
    for name in ("RUN", "RELATIVE"):
        if f"${name}" in asked:
            folder = scratch / name.lower()
            folder.mkdir()
            make_files({}, folder, {})
            prefix = f"{folder}/" if name == "RUN" else ""
            settings = {**OPTIONS, **{key: prefix + OPTIONS[key] for key in ("output", "prompts", "rewards")}}
            options = [text for key, value in settings.items() for text in (f"--{key}", value)]
            arguments = replaced(["train", *options, *FLAGS.values(), *FIXTURE], {"MODEL": MODEL})
            made = launch(arguments, folder, limit=300.0)
            if made.status:
                raise RuntimeError(f"the run to copy could not be made: {made.errors}")
            places[name] = folder / "run"
    return places


def attempt(row: Row, scratch: Path, places: dict[str, Path], limit: float) -> Outcome:
    """Run one row in a new folder inside `scratch`, and judge it."""
    with tempfile.TemporaryDirectory(dir=scratch) as name:
        folder, blocked = Path(name) / "work", Path(name) / "blocked"
        folder.mkdir()
        blocked.mkdir()
        here = {**places, "HERE": folder}
        make_files(row, folder, here)
        if row.get("without"):
            lines = [f"import sys\nsys.modules[{package!r}] = None" for package in row["without"]]
            (blocked / "sitecustomize.py").write_text("\n".join(lines) + "\n")
        before = fingerprint(folder)
        found = launch(arguments_of(row, here), folder, limit=row.get("limit", limit), paths=(blocked,))
        verdict, said = judge(row, found, changes(before, fingerprint(folder)))
    return Outcome("invocations", row["name"], verdict, found.seconds, " ".join(said.split())[:LONGEST])


def launch(arguments: Sequence[str], folder: Path, *, limit: float, paths: Sequence[Path] = ()) -> Ended:
    """Run the command line in a folder, in a process group that is killed at the limit of time or memory."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (*paths, ROOT))),
    }
    start, over = time.monotonic(), ""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            [sys.executable, "-m", "jaxrl_llm.cli", *arguments],
            cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True,
        )  # fmt: skip
        try:
            while not over and not ended(process.pid):
                if time.monotonic() - start > limit:
                    over = f"no end within {limit:g} s"
                elif resident(process.pid) > MEMORY:
                    over = f"took more than {MEMORY // 2**30} GiB"
                time.sleep(0.02)
        finally:
            seconds = time.monotonic() - start
            # Also after it ended by itself: what it started must not go on.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output, errors = _text_of(out), _text_of(err)
    return Ended(None if over else process.returncode, seconds, output, errors, over)


def _text_of(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(1_000_000).decode("utf-8", "replace")


def ended(pid: int) -> bool:
    """Whether a child has ended. It is left to be waited for, so that nothing else can get its number before."""
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def resident(pid: int) -> int:
    """Bytes that a process and its descendants hold in memory; 0 where the system does not say."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except (OSError, IndexError, ValueError):
        return 0
    return pages * os.sysconf("SC_PAGESIZE") + sum(resident(int(child)) for child in children)


def fingerprint(folder: Path) -> dict[str, str]:
    """What is in a folder: path -> what it is, or a hash of its content."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            what = f"link {os.readlink(path)}"
        elif path.is_file():
            what = hashlib.sha256(path.read_bytes()).hexdigest()
        else:
            what = "folder" if path.is_dir() else "special"
        found[str(path.relative_to(folder))] = what
    return found


def changes(before: dict[str, str], after: dict[str, str]) -> str:
    """What an error should have left alone: the first path that is gone, new or another; "" for none.

    A run's lock does not count: the file stays in its folder, held or not.
    """
    for path in sorted(before.keys() | after.keys()):
        if Path(path).name == LOCK:
            continue
        if before.get(path) != after.get(path):
            return f"{path} is {'gone' if path not in after else 'new' if path not in before else 'changed'}"
    return ""


def judge(row: Row, found: Ended, changed: str) -> tuple[str, str]:
    """Verdict, and what was said or what is wrong."""
    printed = [line for line in found.errors.splitlines() if line.strip()]
    status, lines = row.get("status", 2), [line for line in printed if not SO_FAR.fullmatch(line)]
    said = " | ".join(lines) or f"status {found.status}, nothing on stderr"
    if found.limit:
        return "hang", f"{found.limit}: {said}"
    if "Traceback (most recent call last)" in found.errors:
        return "unclear", f"traceback: {lines[-1]}"
    if status != 2:  # something that must be accepted
        good = found.status == status and re.search(row["expect"], found.output + found.errors)
        return ("clear" if good else "unclear"), f"status {found.status}: {said}"
    if found.status == 0:
        return "silent", f"accepted, status {found.status}: {said}"
    if found.status != 2:
        return "unclear", f"status {found.status}: {said}"
    if changed:
        return "wrong", f"{changed}: {said}"
    return ("unclear", f"{problem}: {said}") if (problem := unclear(lines, row["expect"])) else ("clear", said)


def unclear(lines: Sequence[str], expect: str | list[str]) -> str:
    """Why the lines of an error are not clear; "" where they are."""
    wanted = [expect] if isinstance(expect, str) else list(expect)
    if len(lines) != len(wanted):
        return f"{len(lines)} lines for {len(wanted)} errors"
    for line in lines:
        if not line.startswith("error: "):
            return "a line that is no error"
        if len(line) > LONGEST:
            return f"a line of {len(line)} characters"
    left = list(lines)
    for pattern in wanted:
        found = next((line for line in left if re.search(pattern, line)), None)
        if found is None:
            return f"no error matches {pattern!r}"
        left.remove(found)
    return ""


def median_seconds(outcomes: Sequence[Outcome], table: Sequence[Row] | None = None) -> float:
    """Median time of the errors that need no model; NaN without any."""
    rows = read_table() if table is None else table
    quick = {row["name"] for row in rows if not row.get("needs_model") and row.get("status", 2) == 2}
    times = [outcome.seconds for outcome in outcomes if outcome.name in quick]
    return statistics.median(times) if times else float("nan")
