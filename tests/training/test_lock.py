"""Only one process at a time writes to a run's folder."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxrl_llm.training.folder.lock import NAME, locked
from jaxrl_llm.utils.errors import InputError

HOLD = """
import pathlib, sys, time
from jaxrl_llm.training.folder.lock import locked
with locked(pathlib.Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def hold(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_told_who_has_it_and_a_killed_one_has_it_no_more(tmp_path: Path) -> None:
    process = hold(tmp_path)
    try:
        with pytest.raises(InputError, match=f"in use by process {process.pid} on host") as caught, locked(tmp_path):
            pass
        assert "\n" not in str(caught.value)
        assert socket.gethostname() in str(caught.value)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    assert (tmp_path / NAME).exists()
    with locked(tmp_path):
        assert json.loads((tmp_path / NAME).read_text())["process"] == os.getpid()
    assert not (tmp_path / NAME).exists()


def test_it_is_free_again_afterwards_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), locked(tmp_path):
        raise ZeroDivisionError
    with locked(tmp_path), pytest.raises(InputError, match=f"process {os.getpid()} "), locked(tmp_path):
        pass


@pytest.mark.parametrize(
    ("owner", "free"),
    [
        ({"process": 2**22 + 1, "host": socket.gethostname()}, True),
        ({"process": 1, "host": socket.gethostname()}, False),
        ({"process": 2**22 + 1, "host": "elsewhere"}, False),
        ({}, True),
        ([], True),
    ],
)
def test_on_a_file_system_without_locks_the_process_is_looked_for(
    tmp_path: Path, owner: Any, free: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(fcntl, "flock", none)
    (tmp_path / NAME).write_text(json.dumps(owner))
    if free:
        with locked(tmp_path):
            pass
    else:
        with pytest.raises(InputError, match="in use by process"), locked(tmp_path):
            pass
