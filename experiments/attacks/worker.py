"""The command line in a process that stays: its programs are compiled once, and what hangs or dies is started again.

`Worker.ask` is for whoever attacks; `python -m experiments.attacks.worker` is the process.
"""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]


class Reply(NamedTuple):
    """How a command ended. status: None where it hung, negative where a signal ended its process."""

    status: int | None
    out: str
    err: str
    seconds: float

    @property
    def said(self) -> str:
        """Everything that it printed."""
        return self.out + self.err


def environment() -> dict[str, str]:
    """Of a process on the CPU which shares compiled programs, small ones too, with others of its kind."""
    return {
        "PYTHONUNBUFFERED": "1",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(ROOT),
    }


class Worker:
    """Runs commands one after another in one process, which is started with the first and whenever it is gone."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="jaxrl-worker-")
        self._process: subprocess.Popen[str] | None = None

    def ask(self, arguments: list[str], limit: float) -> Reply:
        """Run `jaxrl ARGUMENTS`; after `limit` seconds its process is killed."""
        if self._process is None:
            command = [sys.executable, "-m", "experiments.attacks.worker"]
            pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
            self._process = subprocess.Popen(command, env=environment(), cwd=ROOT, **pipes)
        process, folder, begun = self._process, Path(self._folder.name), time.monotonic()
        assert process.stdin is not None
        assert process.stdout is not None
        out, err = folder / "out", folder / "err"
        process.stdin.write(json.dumps({"arguments": arguments, "out": str(out), "err": str(err)}) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], limit)
        line = process.stdout.readline() if ready else ""
        status = int(json.loads(line)) if line else None
        if not line:
            if not ready:
                process.kill()
            code = process.wait()
            status = code if ready else None
            self.close()
        said, errors = (path.read_text(errors="replace") if path.exists() else "" for path in (out, err))
        return Reply(status, said, errors, time.monotonic() - begun)

    def close(self) -> None:
        """End the process; `ask` starts another."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        self._folder.cleanup()


def remembered(build: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which gives the same object again for equal arguments, so that JAX knows its programs again."""
    made: dict[str, Any] = {}

    def again(*arguments: Any, **named: Any) -> Any:
        key = re.sub(r"output='[^']*'", "", repr((arguments, named)))  # a run's folder is no part of its programs
        if key not in made:
            made[key] = build(*arguments, **named)
        return made[key]

    return again


def run(arguments: list[str]) -> int:
    """The exit status of a command, with what Python prints where it raises."""
    from jaxrl_llm.cli.program import main

    try:
        return main(arguments)
    except BaseException:
        traceback.print_exc()
        return 1


def serve() -> None:
    """Answer requests, each a line of JSON, until there are no more."""
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1):
        os.dup2(nothing, descriptor)
    from jaxrl_llm.training import loop, method

    for module, name in ((method, "make_algorithm"), (method, "make_optimizer")):
        setattr(module, name, remembered(getattr(module, name)))
    setattr(loop, "write_report", str)  # noqa: B010 (for mypy): its charts take longer than such a run
    for line in requests:
        request = json.loads(line)
        for descriptor, name in ((1, "out"), (2, "err")):
            file = os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(file, descriptor)
            os.close(file)
        status = run(request["arguments"])
        sys.stdout.flush()
        sys.stderr.flush()
        replies.write(json.dumps(status) + "\n")
        replies.flush()


if __name__ == "__main__":
    serve()
