"""Main program of a reward's process: load the function, report its signature, then score batch after batch.

The trainer starts the process (see `process`) and may kill it at any time. It does not import JAX. It has two file
descriptors: a socket for messages (see `messages`), and the read end of a pipe that is never written to, whose write
end the trainer keeps open.

Messages, as Python values:
    from the trainer: the reward's name; then for each batch ({column: pickled values}, count, seconds, limit)
    to the trainer: `Ready` or an error message; then for each batch the four fields of an `Outcome`
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import select
import socket
import sys
import time
from pathlib import Path
from typing import NamedTuple

from jaxrl_llm.rewards import loading
from jaxrl_llm.rewards.calling import Outcome, all_failed, call_reward, error_line, parameters
from jaxrl_llm.rewards.messages import receive, send


class Ready(NamedTuple):
    """The first message of a process that has loaded its function."""

    name: str  # of the function
    parameters: list[tuple[str, str, bool]]  # name, kind (such as "KEYWORD_ONLY"), whether it has a default value
    digest: str  # see `loading.Loaded`


def main(connection: int, life: int) -> None:
    """Serve until the trainer closes the connection. The arguments are the two file descriptors."""
    del sys.argv[1:]  # not meant for the reward
    for descriptor in (connection, life):
        os.set_inheritable(descriptor, False)
    _end_with_trainer(life)
    _be_first_to_go()
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(line_buffering=True)  # keeps a reward's output even if its process is killed
    with contextlib.suppress(EOFError, ConnectionError):
        _serve(socket.socket(fileno=connection))
    # Do not wait for threads that the reward started.
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(0)


def _serve(channel: socket.socket) -> None:
    try:
        loaded = loading.load(receive(channel))
    except Exception as error:
        send(channel, str(error) or error_line(error))
        return
    function = loaded.function
    takes = [(p.name, p.kind.name, p.default is not p.empty) for p in parameters(function)]
    send(channel, Ready(str(getattr(function, "__name__", type(function).__name__)), takes, loaded.digest))
    with contextlib.suppress(Exception):  # the first call will report the problem
        loaded.warm_up()
    while True:
        columns, count, seconds, limit = receive(channel)
        deadline = time.monotonic() + seconds
        send(channel, tuple(_score(loaded, columns, count, deadline, limit)))


def _score(loaded: loading.Loaded, columns: dict[str, bytes], count: int, deadline: float, limit: float) -> Outcome:
    arguments = {}
    for name, data in columns.items():
        try:
            arguments[name] = pickle.loads(data)
        except BaseException as error:  # e.g. an object of a class that only the trainer can import
            problem = f"column {name!r} cannot be read in the reward's process: {error_line(error)}"
            return all_failed(count, problem, 0.0)
    return call_reward(loaded.function, arguments, count, deadline, limit)


def _end_with_trainer(life: int) -> None:
    """Have the kernel end this process and its children when the trainer exits, even if it is killed.

    The kernel then closes the write end of the pipe and sends SIGIO to this process group, whose default action ends
    the processes. No Python code has to run, so this works while a reward holds the GIL.
    """
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:  # the trainer exited before SIGIO was requested
        os._exit(0)


def _be_first_to_go() -> None:
    """Make the kernel's out-of-memory killer choose this process rather than the trainer."""
    with contextlib.suppress(OSError):  # not on Linux, or forbidden
        Path("/proc/self/oom_score_adj").write_text("1000")
