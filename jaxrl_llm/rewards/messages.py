"""Messages between the trainer and a reward's process over a socket: 8 bytes of length, then a pickle."""

from __future__ import annotations

import pickle
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

_LENGTH = struct.Struct(">Q")
_TICK = 0.05  # seconds between two checks of a silent process


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
