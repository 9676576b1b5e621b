"""Other programs that work for a run: they dial its learner, and answer its calls one at a time.

Messages are pickles, which both sides take from nobody who does not know the key (HMAC, `multiprocessing.connection`).
They are not encrypted: both sides belong in one private network.
"""

import contextlib
import os
import queue
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from jaxrl_llm.utils.errors import InputError, shown

KEY = "JAXRL_SAMPLER_KEY"
HANDSHAKE = 10.0  # seconds for the other end to show that it knows the key
ANY = ("0.0.0.0", "::")
LOST = (EOFError, OSError)  # what calls of a program that is gone raise


def shared_key() -> bytes:
    """The key that all programs of a run have. InputError without one."""
    if not (key := os.environ.get(KEY)):
        raise InputError(
            f"{KEY} is not set: give the learner and its samplers the same secret in that variable, such as what "
            "openssl rand -hex 16 prints"
        )
    return key.encode()


def address_of(text: str, index: int = 0) -> tuple[str, int]:
    """HOST:PORT as a pair, and of the host `index` of several the port so much higher. InputError for another text.

    >>> address_of("10.0.0.7:7000", index=1)
    ('10.0.0.7', 7001)
    """
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or int(port) + index >= 2**16:
        raise InputError(f"the address is {shown(text)}, but must be HOST:PORT")
    return host, int(port) + index


class Peer:
    """The learner's end of the connection to one program. Its methods are called from one thread.

    said: called in a thread of its own with what the program says unasked; lost: called there once it is gone.
    """

    def __init__(self, connection: Connection, said: Callable[[Any], object], lost: Callable[[], object]) -> None:
        self._connection, self._said, self._lost = connection, said, lost
        self._answers = queue.SimpleQueue[Any]()
        self.gone = False
        self.host = own_address(connection)  # of this machine, as the program reaches it
        threading.Thread(target=self._listen, daemon=True, name="peer").start()

    def ask(self, name: str, *arguments: Any) -> None:
        """Ask for a call, whose result is the next `answer`. Raises one of LOST if the program is gone."""
        self._connection.send((name, arguments))

    def answer(self) -> Any:
        """The result of the call that was asked for. Raises what it has raised there, and EOFError."""
        kind, value = self._answers.get()
        if kind == "lost":
            self._answers.put((kind, value))
            raise EOFError("the program is gone")
        if kind == "raised":
            raise value
        return value

    def call(self, name: str, *arguments: Any) -> Any:
        """`ask`, and its `answer`."""
        self.ask(name, *arguments)
        return self.answer()

    def close(self) -> None:
        """End the connection."""
        with contextlib.suppress(OSError):
            # Not `close` alone: the thread that reads would keep the connection open.
            with socket.socket(fileno=os.dup(self._connection.fileno())) as own:
                own.shutdown(socket.SHUT_RDWR)
            self._connection.close()

    def _listen(self) -> None:
        try:
            while True:
                kind, value = self._connection.recv()
                if kind == "said":
                    self._said(value)
                else:
                    self._answers.put((kind, value))
        except (*LOST, TypeError):  # TypeError: closed by this side while it reads
            self.gone = True
            self._answers.put(("lost", None))
            self._lost()


class PeerListener:
    """Accepts connections of programs that know the key, in a thread, until it is closed."""

    def __init__(self, address: tuple[str, int], key: bytes) -> None:
        """Raises InputError if the address cannot be listened on."""
        try:
            self._listener = Listener(address)
        except OSError as error:
            raise InputError(
                f"{address[0]}:{address[1]} cannot be listened on: {error.strerror or error}; give another address"
            ) from None
        self._key, self._found = key, queue.SimpleQueue[Connection]()
        host, port = self._listener.address[:2]
        self.address = f"{socket.gethostname() if host in ANY else host}:{port}"
        self._open = True
        threading.Thread(target=self._accept, daemon=True, name="peer listener").start()

    def next(self) -> Connection | None:
        """The next connection that no one has taken, if there is one."""
        with contextlib.suppress(queue.Empty):
            return self._found.get_nowait()
        return None

    def close(self) -> None:
        """Accept no more, and end the connections that no one has taken."""
        self._open = False
        with contextlib.suppress(OSError), socket.create_connection(self._listener.address, timeout=1):
            pass  # so that its thread stops waiting for a call
        self._listener.close()
        while (waiting := self.next()) is not None:
            waiting.close()

    def _accept(self) -> None:
        while self._open:
            with contextlib.suppress(OSError):
                connection = self._listener.accept()
                # In a thread: whoever says nothing must not keep others waiting.
                arguments = (connection,)
                threading.Thread(target=self._authenticate, args=arguments, daemon=True, name="authentication").start()

    def _authenticate(self, connection: Connection) -> None:
        timer = threading.Timer(HANDSHAKE, connection.close)
        timer.start()
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
        except (*LOST, TypeError, AuthenticationError):
            connection.close()
            return
        finally:
            timer.cancel()
        _with_keepalive(connection)
        if self._open:
            self._found.put(connection)
        else:
            connection.close()


def dial(address: str, key: bytes, seconds: float) -> Connection | None:
    """A connection to a learner, once it listens; None if it does not within so many seconds.

    InputError where it has another key.
    """
    until = time.monotonic() + seconds
    while time.monotonic() <= until:
        try:
            connection = Client(address_of(address), authkey=key)
        except AuthenticationError:
            raise InputError(f"the learner at {address} has another key: give both the same in {KEY}") from None
        except LOST:
            time.sleep(0.5)
        else:
            _with_keepalive(connection)
            return connection
    return None


def _with_keepalive(connection: Connection) -> None:
    """End the connection where the other machine does not answer for a minute."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4)):
            if hasattr(socket, name):  # not everywhere
                own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def own_address(connection: Connection) -> str:
    """The address of this machine, as the other end reaches it."""
    with socket.socket(fileno=os.dup(connection.fileno())) as own:
        return str(own.getsockname()[0])
