"""JAX's coordination service in a process of its own, which outlives the host that started it by some seconds.

`jax.distributed.initialize` runs it inside process 0. When that process is killed, JAX aborts all others at once, with
a stack trace; with the service still there, they find out themselves which host is silent (`alive`).
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

LINGER = 45.0  # seconds that the service outlives, at most, a host that did not end it
WAITING = 60.0  # seconds for the service of an earlier run at this port to end
PROGRAM = """
import json, sys, time
from jax._src.lib import _jax
address, count, options, linger = sys.argv[1:]

def connected():
    'Whether a host is: a run that is started again needs the port. Where the system does not tell, True.'
    try:
        rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/net/{name}")]
    except OSError:
        return True
    port = f":{int(address.rpartition(':')[2]):04X}"
    return any(row[1].endswith(port) and row[3] == "01" for row in rows)

service = _jax.get_distributed_runtime_service(address, int(count), **json.loads(options))
if not sys.stdin.buffer.read(1):
    until = time.monotonic() + float(linger)
    while connected() and time.monotonic() < until:
        time.sleep(0.2)
service.shutdown()
"""


class Service:
    """Stands in for the service that `jax.distributed` would start."""

    def __init__(self, address: str, count: int, **options: Any) -> None:
        _wait_for_port(int(address.rpartition(":")[2]))
        command = [sys.executable, "-c", PROGRAM, address, str(count), json.dumps(options), str(LINGER)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # hosts say themselves what happens
            start_new_session=True,
        )  # fmt: skip

    def shutdown(self) -> None:
        """End the service."""
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended already
            self.process.stdin.write(b".")
            self.process.stdin.close()
        self.process.wait()


def _wait_for_port(port: int) -> None:
    """Return once nothing listens on the port: two services could share it, and each would get some of the hosts.

    RuntimeError if something goes on listening.
    """
    until = time.monotonic() + WAITING
    while True:
        with socket.socket(socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET) as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections do not matter
            try:
                one.bind(("", port))
                return
            except OSError as error:
                if time.monotonic() > until:
                    raise RuntimeError(f"port {port} is in use: {error.strerror}") from None
        time.sleep(0.5)


@contextmanager
def service_apart() -> Iterator[None]:
    """Within it `jax.distributed.initialize` starts the service, where it starts one, as `Service`."""
    from jax._src.lib import _jax  # JAX has no public way

    own = _jax.get_distributed_runtime_service
    _jax.get_distributed_runtime_service = Service
    try:
        yield
    finally:
        _jax.get_distributed_runtime_service = own
