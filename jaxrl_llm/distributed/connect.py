"""Joining the hosts of a run, and ending with them: a host that fails or dies takes the others with it (`alive`).

JAX's coordination service, which `jax.distributed.initialize` runs inside process 0, has a process of its own here that
outlives its host by some seconds. When process 0 is killed, JAX would abort all others at once, with a stack trace;
with the service still there, they find out themselves which host is silent.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from jaxrl_llm.distributed.alive import BEAT, SILENT, Watch
from jaxrl_llm.utils.errors import InputError, shown
from jaxrl_llm.utils.process import Preempted

STARTING = 120  # seconds for all hosts to arrive


def connect(coordinator: str | None = None, count: int | None = None, index: int | None = None) -> Watch:
    """Join the other processes of a run, before anything else uses JAX. See `jax.distributed.initialize`.

    coordinator: HOST:PORT of the process with index 0. Without these three, a TPU pod, SLURM, Open MPI or GKE tells
    them. Returns the watch over the other hosts, which has begun. InputError where the coordinator cannot be reached,
    or there is no such cluster.
    """
    import jax

    explicit = coordinator is not None
    if explicit:
        if count is None or index is None:
            raise InputError("--coordinator needs --processes and --process, the number of this one from 0 on")
        if not 0 <= index < count:
            raise InputError(f"--process is {index}, but must be from 0 to {count - 1}")
        _check_reachable(str(coordinator), index)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    # The store outlives a dead host, so that the others can say which one it was.
    jax.config.update("jax_enable_recoverability", True)
    options: dict[str, Any] = {"cluster_detection_method": "deactivate"} if explicit else {}
    try:
        with service_apart():
            jax.distributed.initialize(
                coordinator, count, index, initialization_timeout=STARTING, heartbeat_timeout_seconds=int(3 * SILENT),
                shutdown_timeout_seconds=int(SILENT), **options,
            )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        said = " ".join(str(error).split())
        where = f"the coordinator {coordinator}" if explicit else "this machine's cluster"
        raise InputError(
            f"process {index} cannot join {where} within {STARTING} s ({said[:200]}): start all processes, with the "
            "same --coordinator and --processes"
        ) from None
    # Not `jax.process_index()`: it waits for the devices of all hosts, one of which may be dead already.
    state = _state()
    watch = Watch(state.client, state.process_id, state.num_processes)
    watch.start()
    return watch


def leave(watch: Watch) -> None:
    """Leave the other hosts, once all of them call this."""
    import jax

    state = _state()
    state.client.wait_at_barrier("jaxrl/end", 1000 * STARTING)
    watch.stop()
    if state.process_id == 0:  # the coordinator goes last
        time.sleep(3 * BEAT)
    jax.distributed.shutdown()


def _check_reachable(coordinator: str, index: int) -> None:
    """InputError unless something answers at HOST:PORT in time; the first process is what will answer there."""
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"--coordinator is {shown(coordinator)}, but must be HOST:PORT")
    until = time.monotonic() + STARTING
    while index:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise InputError(
                    f"no coordinator answers at {coordinator} ({error.strerror or error}): is process 0 running, and "
                    "is the port open?"
                ) from None
            time.sleep(0.5)


def _state() -> Any:
    """JAX's record of the cluster; its client is None for a process alone."""
    from jax._src import distributed  # JAX has no public way to it

    return distributed.global_state


@contextmanager
def joined(coordinator: str | None = None, count: int | None = None, index: int | None = None) -> Iterator[bool]:
    """`connect`, and `leave` at the end. Yields whether this is the first host.

    An error inside waits until the other hosts have shown that they live, and then ends them too, with the same words.
    If one of them is dead, which may show as any error of any collective, the process ends with a line that says so.
    """
    watch = connect(coordinator, count, index)
    stopped: Preempted | None = None
    try:
        try:
            yield _state().process_id == 0
        except Preempted as error:  # as all hosts, which have saved together
            stopped = error
        leave(watch)
    except BaseException as error:
        if not isinstance(error, KeyboardInterrupt):
            watch.hold(error)
        watch.tell(error)
        raise
    if stopped is not None:
        raise stopped


def is_joined() -> bool:
    """Whether this process is one of several that have joined."""
    return _state().client is not None


def end(status: int) -> None:
    """Exit at once after a failure: JAX, and threads that write, would wait for the other hosts."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


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
