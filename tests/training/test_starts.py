"""Starts that hang: phases are said, what others wrote has time limits, and a signal ends the process at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_runs as runs

from jaxrl_llm.models.io.load import load_tokenizer
from jaxrl_llm.training.config import TrainConfig
from jaxrl_llm.training.rollout.agents import check_agent
from jaxrl_llm.utils import storage
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.process import PREEMPTED, Preempted, interruptible, preemptible
from jaxrl_llm.utils.starting import limited, phase, starting

PATIENCE = 300.0  # seconds until something must have happened

START = """
import ctypes, signal, subprocess, sys, threading, time
from jaxrl_llm.utils.process import interruptible, preemptible
from jaxrl_llm.utils.starting import phase, started, starting

def block():
    print("ready", flush=True)
    while True:
        ctypes.CDLL(None).sleep(1000)  # no Python between two calls of the system

with preemptible(), interruptible(), starting({limit}, "--limit", grace=0.1, said=0.1):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10**6)"])
    print(child.pid, flush=True)
    with phase("load it", foreign=True):
        {body}
"""


def start(body: str, limit: float = 1e6) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", START.format(body=body, limit=limit)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, PREEMPTED), (signal.SIGINT, 130)])
def test_a_signal_ends_a_start_that_waits_for_the_system(number: signal.Signals, status: int) -> None:
    process = start("block()")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == status, errors
    what = "stopped by SIGTERM" if number == signal.SIGTERM else "interrupted"
    assert errors.splitlines()[-1] == (
        f"{what} before the first step, still to load it: nothing was written, the same command starts again"
    )
    if sys.platform == "linux":
        until = time.monotonic() + PATIENCE
        while not is_gone(child) and time.monotonic() < until:  # the kernel ends it when it is scheduled
            time.sleep(0.01)
        assert is_gone(child)


def test_a_phase_of_foreign_code_has_a_time_limit_and_is_said_before() -> None:
    process = start("block()", limit=2.0)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 2, errors
    *said, last = errors.splitlines()
    assert any(line.endswith(" s so far to load it") for line in said)
    assert last == "error: it took more than 2 s to load it, which --limit allows"


def test_a_start_that_is_over_is_not_ended() -> None:
    """Then a signal is deferred to the end of the step, as long as that takes."""
    process = start("started(); signal.raise_signal(signal.SIGTERM); time.sleep(1); child.kill(); print('on')")
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors
    assert out.splitlines()[-1] == "on"
    assert errors == ""


END = """
import subprocess, sys, threading
from jaxrl_llm.cli import program as cli
def left(arguments):
    threading.Thread(target=threading.Event().wait).start()
    if arguments:
        raise KeyboardInterrupt
    return 1
cli.COMMANDS["left"], cli.ENDED = left, 0.5
sys.exit(cli.main())
"""


@pytest.mark.parametrize(("words", "status"), [(["stopped"], 130), ([], 1)])
def test_threads_of_others_do_not_keep_a_command_from_its_end(words: list[str], status: int) -> None:
    done = subprocess.run([sys.executable, "-c", END, "left", *words], timeout=PATIENCE, check=False)
    assert done.returncode == status


def test_a_limited_call_that_hangs_is_left() -> None:
    with pytest.raises(InputError, match="too late"):
        limited(threading.Event().wait, 0.05, "too late")


def test_a_limited_call_may_take_long_while_it_makes_progress() -> None:
    seen, done = list[int](), threading.Event()

    def progress() -> int:
        seen.append(len(seen))
        if len(seen) == 4:
            done.set()
        return len(seen)

    assert limited(lambda: done.wait(PATIENCE), 0.05, "too late", progress)


def test_a_limited_call_raises_what_its_function_raises() -> None:
    def fails() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        limited(fails, 60.0, "too late")


def test_a_limited_call_is_left_after_a_signal_and_its_phase_is_said() -> None:
    def hangs() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Event().wait()

    with (
        pytest.raises(Preempted, match="before the first step, still to try it: nothing was written"),
        preemptible(), interruptible(), starting(1e6, "--limit", grace=1e6), phase("try it"),
    ):  # fmt: skip
        limited(hangs, 1e6, "too late")


WORLD = """
import threading

def hang(where):
    if where == "{where}":
        print("hangs", flush=True)
        threading.Event().wait()

hang("import")

class World:
    def __init__(self):
        hang("__init__")

    def reset(self, *, seed=None, options=None):
        hang("reset")
        return "a?", {{}}

    def step(self, action):
        return "b", 1.0, True, False, {{}}

    def close(self):
        hang("close")

class Own(World):  # of our protocol
    tools = ()
"""


def world_config(folder: Path, where: str, **changes: Any) -> TrainConfig:
    """A run in an environment that hangs there."""
    (folder / "world.py").write_text(WORLD.format(where=where))
    given = {"environment": f"{folder}/world.py:World", "eval_size": 0, "rollout_time_limit": 0.2}
    return runs.small_config(folder, **{**given, **changes})


def test_an_environment_that_cannot_be_made_in_time_is_refused(tmp_path: Path) -> None:
    config = world_config(tmp_path, "__init__")
    with pytest.raises(InputError, match=r"more than 0.2 s to make the environment .*World, which rollout_time_limit"):
        check_agent(config, [{"prompt": "a"}], lambda: load_tokenizer(config.model))


def test_an_environment_that_does_not_close_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = world_config(tmp_path, "close", environment=f"{tmp_path}/world.py:Own")
    check_agent(config, [{"prompt": "a"}], lambda: load_tokenizer(config.model))
    assert "more than 0.2 s to close the environment" in caplog.text


@pytest.fixture
def silent_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Of a server that takes connections and never answers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"http://127.0.0.1:{server.getsockname()[1]}/prompts.jsonl"


def test_a_url_that_never_answers_is_refused(silent_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.setattr(storage, "SILENT", 0.2)
    with pytest.raises(InputError, match=r"prompts.jsonl has sent nothing for 0.2 s: check its server"):
        storage.local_copy(silent_url)
    assert not list(storage._copies().glob("*")), "what was copied is removed"


@pytest.mark.heavy
@pytest.mark.parametrize("where", ["import", "__init__", "url"])
def test_sigterm_ends_a_start_that_hangs(tmp_path: Path, silent_url: str, where: str) -> None:
    options = {"prompts": silent_url, "environment": None} if where == "url" else {}
    config = world_config(tmp_path, where, rollout_time_limit=3600.0, **options)
    if where == "url":
        pytest.importorskip("aiohttp")
    process = runs.start("train", *runs.as_arguments(config))
    assert process.stderr is not None
    assert "5 s so far to " in process.stderr.readline()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == PREEMPTED, errors
    assert "before the first step, still to " in errors
    assert not Path(config.output).exists()


@pytest.mark.heavy
def test_sigterm_ends_a_step_whose_environment_hangs(tmp_path: Path) -> None:
    config = world_config(tmp_path, "reset", rollout_time_limit=3600.0)
    process = runs.start("train", *runs.as_arguments(config))
    assert process.stdout is not None
    while "hangs" not in (line := process.stdout.readline()):
        assert line, process.communicate()
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == PREEMPTED, errors
