"""JAX's coordination service in a process of its own, which outlives the host that started it by some seconds.

`jax.distributed.initialize` runs it inside process 0. When that process is killed, JAX aborts all others at once, with
a stack trace; with the service still there, they find out themselves which host is silent (`connect`).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

LINGER = 45.0  # seconds that the service outlives a host that did not end it
PROGRAM = """
import json, sys, time
from jax._src.lib import _jax
service = _jax.get_distributed_runtime_service(sys.argv[1], int(sys.argv[2]), **json.loads(sys.argv[3]))
if not sys.stdin.buffer.read(1):
    time.sleep(float(sys.argv[4]))
service.shutdown()
"""


class Service:
    """Stands in for the service that `jax.distributed` would start."""

    def __init__(self, address: str, count: int, **options: Any) -> None:
        command = [sys.executable, "-c", PROGRAM, address, str(count), json.dumps(options), str(LINGER)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)

    def shutdown(self) -> None:
        """End the service."""
        assert self.process.stdin is not None
        with suppress(OSError):  # it has ended already
            self.process.stdin.write(b".")
            self.process.stdin.close()
        self.process.wait()


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
