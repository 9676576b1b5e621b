"""A reward's process: load the function, report its signature, then call it on batch after batch.

The trainer starts the process (see `process`), whose main program is `main`, and may kill it at any time. It does not
import JAX or NumPy. It has two file descriptors: a socket for messages, and the read end of a pipe that is never
written to, whose write end the trainer keeps open.

Messages are 8 bytes of length, then a pickle (`send`, `receive`). As Python values:
    from the trainer: the reward's name; then for each batch ({column: pickled values}, count, seconds, limit)
    to the trainer: `Ready` or an error message; then for each batch the fields of an `Outcome`

`call_reward` turns whatever a function returns or raises into N numbers, and the entries that come with them.
"""

from __future__ import annotations

import contextlib
import fcntl
import inspect
import math
import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.errors import error_line
from jaxrl_llm.rewards import loading
from jaxrl_llm.rewards.entries import Entries, joined, parsed, provided

_LENGTH = struct.Struct(">Q")
_TICK = 0.05  # seconds between two checks of a silent process


class Ready(NamedTuple):
    """The first message of a process that has loaded its function."""

    name: str  # of the function
    parameters: list[tuple[str, str, bool]]  # name, kind (such as "KEYWORD_ONLY"), whether it has a default value
    digest: str  # see `loading.Loaded`
    provides: tuple[str, ...] = ()  # see `entries.provided`


def main(connection: int, life: int) -> None:
    """Serve until the trainer closes the connection. The arguments are the two file descriptors."""
    del sys.argv[1:]  # not meant for the reward
    for descriptor in (connection, life):
        os.set_inheritable(descriptor, False)
    _end_with_trainer(life)
    _be_first_to_go()
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
        send(channel, str(error) or error_line(error))
        return
    function = loaded.function
    takes = [(p.name, p.kind.name, p.default is not p.empty) for p in parameters(function)]
    try:
        gives = provided(function)
    except TypeError as error:
        send(channel, f"cannot load rewards: {function!r}: {error}")
        return
    send(channel, Ready(str(getattr(function, "__name__", type(function).__name__)), takes, loaded.digest, gives))
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


def send(connection: socket.socket, value: Any, deadline: float | None = None) -> None:
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


class Outcome(NamedTuple):
    """The result of one function on N samples. None and NaN mean "not scored"; `failed` samples get the default."""

    values: list[float]  # N, NaN where not scored or failed
    failed: list[bool]  # N
    problem: str  # the first error in one line, "" if there was none
    seconds: float  # wall-clock time of the call
    entries: Mapping[str, list[Any]] = {}  # further entries that the function returns; see `entries`


def call_reward(
    function: Callable[..., Any], arguments: Mapping[str, list[Any]], count: int, deadline: float, limit: float
) -> Outcome:
    """Call the function on the batch and, if it raises, on each sample separately. Never raises.

    arguments: name -> `count` values. deadline: on the clock of time.monotonic(); later results are discarded. limit:
    the time limit in seconds, for the message.
    """
    start = time.monotonic()
    try:
        values, failed, entries, problem = parsed(_call(function, arguments, deadline), count)
        if time.monotonic() > deadline:
            return all_failed(count, time_limit_text(limit), time.monotonic() - start)
        return Outcome(values, failed, problem, time.monotonic() - start, entries)
    except BaseException as error:  # even sys.exit() in a reward only makes the reward fail
        problem = error_line(error)

    values, failed = _lost(count)
    parts: list[Entries] = [{} for _ in range(count)]
    for sample in range(count):
        if time.monotonic() >= deadline:
            return all_failed(count, time_limit_text(limit), time.monotonic() - start)
        try:
            one = {name: column[sample : sample + 1] for name, column in arguments.items()}
            value, lost, parts[sample], why = parsed(_call(function, one, deadline), 1)
            values[sample], failed[sample] = value[0], lost[0]
            problem = problem or why
        except BaseException:  # counts as failed; only the exception of the whole batch is logged
            continue
    return Outcome(values, failed, problem, time.monotonic() - start, joined((part, 1) for part in parts))


def all_failed(count: int, problem: str, seconds: float) -> Outcome:
    """The outcome of a function that failed on all samples."""
    return Outcome(*_lost(count), problem, seconds)


def time_limit_text(limit: float) -> str:
    """The problem of a function that exceeds its time limit."""
    return f"TimeoutError: no result within its time limit of {limit:g} s"


def parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The function's parameters; **columns if Python has no signature, as for some built-in functions."""
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return [inspect.Parameter("columns", inspect.Parameter.VAR_KEYWORD)]


def _call(function: Callable[..., Any], arguments: Mapping[str, list[Any]], deadline: float) -> Any:
    result = function(**arguments)
    if not inspect.isawaitable(result):
        return result
    import asyncio  # here, because it takes a third of the start-up time of a reward's process

    async def within_limit(awaitable: Awaitable[Any]) -> Any:
        return await asyncio.wait_for(awaitable, max(0.0, deadline - time.monotonic()))

    return asyncio.run(within_limit(result))


def _lost(count: int) -> tuple[list[float], list[bool]]:
    return [math.nan] * count, [True] * count
