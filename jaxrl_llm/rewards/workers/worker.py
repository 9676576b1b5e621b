"""A reward's process: load the function, report its signature, then call it on batch after batch.

The trainer starts the process (see `process`), whose main program is `main`, and may kill it at any time. It does not
import JAX or NumPy. It has two file descriptors: a socket for messages, and the read end of a pipe that is never
written to, whose write end the trainer keeps open.

Messages are 8 bytes of length, then a pickle (`send_value`, `receive`). As Python values:
    from the trainer: the reward's name; then for each call a `ScoreRequest`
    to the trainer: `Ready` or an error message, and WARM after some; then for each call the `Outcome` or `Lost` of all
    samples, or those of one sample after another
"""

import contextlib
import fcntl
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.rewards.entries import provided
from jaxrl_llm.rewards.workers import loading
from jaxrl_llm.rewards.workers.calling import (
    CallInfo,
    CallMode,
    Lost,
    calls,
    parameters_of,
    reads_environments,
    wants_texts,
)
from jaxrl_llm.utils.errors import error_line

_LENGTH = struct.Struct(">Q")
_TICK = 0.05  # seconds between two checks of a silent process


class Ready(NamedTuple):
    """The first message of a process that has loaded its function."""

    name: str  # of the function
    parameters: list[tuple[str, str, bool]]  # name, kind (such as "KEYWORD_ONLY"), whether it has a default value
    digest: str  # see `loading.Loaded`
    provides: tuple[str, ...] = ()  # see `entries.provided`
    per_sample: bool = False  # attributes of the function, see `limits`
    own_limits: bool = False
    wants_texts: bool = False  # see `calling.wants_texts`, and `reads_environments`
    reads_environments: bool = False
    warms_up: bool = False  # whether WARM follows


WARM = "warm"  # the message of a process that has imported what its first call needs


class ScoreRequest(NamedTuple):
    """What is asked for: see `calling.calls`."""

    columns: dict[str, bytes]  # pickled values
    number: int  # of samples
    given: CallInfo
    how: CallMode


def main(connection: int, life: int) -> None:
    """Serve until the trainer closes the connection. The arguments are the two file descriptors."""
    del sys.argv[1:]  # not meant for the reward
    for descriptor in (connection, life):
        os.set_inheritable(descriptor, False)
    _end_with_trainer(life)
    with contextlib.suppress(OSError):  # not on Linux, or forbidden
        Path("/proc/self/oom_score_adj").write_text("1000")  # the kernel kills this rather than the trainer
    # Schedulers send SIGTERM to every process of a job; the trainer, which then saves its state, ends this one.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
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
        send_value(channel, str(error) or error_line(error))
        return
    function = loaded.function
    takes = [(p.name, p.kind.name, p.default is not p.empty) for p in parameters_of(function)]
    try:
        gives = provided(function)
    except TypeError as error:
        send_value(channel, f"cannot load rewards: {function!r}: {error}")
        return
    name = str(getattr(function, "__name__", type(function).__name__))
    flags = [bool(getattr(function, flag, False)) for flag in ("per_sample", "own_limits")]
    flags += [wants_texts(function), reads_environments(function), loaded.warm_up is not None]
    send_value(channel, Ready(name, takes, loaded.digest, gives, *flags))
    if loaded.warm_up is not None:
        with contextlib.suppress(Exception):  # the first call will report the problem
            loaded.warm_up()
        send_value(channel, WARM)
    while True:
        _answer(channel, loaded.function, receive(channel))


def _answer(channel: socket.socket, function: Callable[..., Any], asked: ScoreRequest) -> None:
    """Make the calls of a message and send their results."""
    arguments = {}
    for name, data in asked.columns.items():
        try:
            arguments[name] = pickle.loads(data)
        except BaseException as error:  # e.g. an object of a class that only the trainer can import
            problem = f"column {name!r} cannot be read in the reward's process: {error_line(error)}"
            for _ in range(asked.number if asked.how.each else 1):
                send_value(channel, Lost(problem))
            return
    for one in calls(function, arguments, asked.number, asked.given, asked.how):
        send_value(channel, one)


def _end_with_trainer(life: int) -> None:
    """Have the kernel end this process and its children when the trainer exits, even if it is killed.

    The kernel then closes the write end of the pipe and sends SIGIO to this process group, whose default action ends
    the processes. No Python code has to run, so this works while a reward holds the GIL.
    """
    fcntl.fcntl(life, fcntl.F_SETOWN, -os.getpgrp())
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:  # the trainer exited before SIGIO was requested
        os._exit(0)


def send_value(connection: socket.socket, value: Any, deadline: float | None = None) -> None:
    """Send a value. deadline: on the clock of time.monotonic(); None: no limit.

    Raises TimeoutError after the deadline, another OSError if the connection is closed.
    """
    data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    connection.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
    connection.sendall(_LENGTH.pack(len(data)))
    connection.sendall(data)


def receive(
    connection: socket.socket, deadline: float | None = None, meanwhile: Callable[[], None] | None = None
) -> Any:
    """Wait for a value, calling `meanwhile` every 50 ms.

    Raises TimeoutError after the deadline, EOFError or another OSError if the connection is closed, and any exception
    of `meanwhile` or of unpickling.
    """
    (length,) = _LENGTH.unpack(_read(connection, _LENGTH.size, deadline, meanwhile))
    return pickle.loads(_read(connection, length, deadline, meanwhile))


def _read(
    connection: socket.socket, length: int, deadline: float | None, meanwhile: Callable[[], None] | None
) -> bytes:
    data = bytearray()
    while len(data) < length:
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise TimeoutError
        connection.settimeout(left if meanwhile is None else _TICK if left is None else min(_TICK, left))
        try:
            chunk = connection.recv(min(length - len(data), 2**20))
        except TimeoutError:
            if meanwhile is not None:
                meanwhile()
            continue
        if not chunk:
            raise EOFError("the connection is closed")
        data += chunk
    return bytes(data)
