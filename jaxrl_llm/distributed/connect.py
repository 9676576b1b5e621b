"""Joining the hosts of a run, and ending with them: a host that fails or dies takes the others with it.

Each host shows by a counter in the coordinator's store that it is alive, and watches those of the others. So a process
that was killed is noticed within SILENT seconds, whatever the others are doing, and the last words of one that failed
are printed by all.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jaxrl_llm.distributed.coordinator import service_apart
from jaxrl_llm.errors import InputError, shown
from jaxrl_llm.process import Preempted

BEAT, SILENT = 1.0, 20.0  # seconds between two signs of life, and after which a host counts as dead
STARTING = 120  # seconds for all hosts to arrive
LOST = 75  # exit status of the hosts that go on when another has died: a scheduler may start the job again
SAID, ALIVE = "jaxrl/said", "jaxrl/alive"


def connect(coordinator: str | None = None, count: int | None = None, index: int | None = None) -> Callable[[], None]:
    """Join the other processes of a run, before anything else uses JAX. See `jax.distributed.initialize`.

    coordinator: HOST:PORT of the process with index 0. Without these three, a TPU pod, SLURM, Open MPI or GKE tells
    them. Returns a function that leaves, once all hosts call it. InputError where the coordinator cannot be reached,
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
    done = threading.Event()
    watch = threading.Thread(target=_watch, args=(done,), daemon=True, name="alive")
    watch.start()

    def leave() -> None:
        _client().wait_at_barrier("jaxrl/end", 1000 * STARTING)
        done.set()
        watch.join()
        if jax.process_index() == 0:  # the coordinator goes last
            time.sleep(3 * BEAT)
        jax.distributed.shutdown()

    return leave


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


def _client() -> Any:
    """The client of the coordinator's store, or None for a process alone."""
    from jax._src import distributed  # JAX has no public way to it

    return distributed.global_state.client


@contextmanager
def joined(coordinator: str | None = None, count: int | None = None, index: int | None = None) -> Iterator[bool]:
    """`connect`, and leave at the end. Yields whether this is the first host.

    An error inside ends the other hosts too, with the same words.
    """
    import jax

    leave = connect(coordinator, count, index)
    try:
        yield jax.process_index() == 0
    except Preempted:  # as all hosts, which have saved together
        leave()
        raise
    except BaseException as error:
        if isinstance(error, jax.errors.JaxRuntimeError):
            time.sleep(2 * SILENT)  # it may be the death of another host, which `_watch` then names
        tell(str(error) or type(error).__name__)
        raise
    leave()


def tell(text: str) -> None:
    """Leave last words for the other hosts."""
    import jax

    with contextlib.suppress(Exception):  # the coordinator may be gone
        _client().key_value_set(f"{SAID}/{jax.process_index()}", text)
        time.sleep(3 * BEAT)  # for the others to read it


def end(status: int) -> None:
    """Exit at once after a failure: JAX would wait for the other hosts."""
    if status and _client() is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _watch(done: threading.Event) -> None:
    """Show that this host is alive, and end it when another host has failed or died; until `done`."""
    import jax

    client, index, count = _client(), jax.process_index(), jax.process_count()
    judge, beats, failing = silent_since(SILENT), 0, 0.0
    while not done.wait(BEAT):
        try:
            client.key_value_set(f"{ALIVE}/{index}", str(beats := beats + 1), allow_overwrite=True)
            said = _directory(client, SAID)
            seen = _directory(client, ALIVE)
            failing = 0.0
        except Exception:
            failing = failing or time.monotonic()
            if time.monotonic() - failing > SILENT / 2:
                _leave("the coordination service, on host 0, is gone", LOST)
            continue
        for other, text in said.items():
            if index not in said:  # or this host is ending by itself, with its own words
                _leave(f"host {other} ended: {text}", 2)
        if dead := judge({other: seen.get(other, "") for other in range(count)}, time.monotonic()):
            _leave(f"host {dead[0]} has shown no sign of life for {SILENT:.0f} s", LOST)


def _directory(client: Any, name: str) -> dict[int, str]:
    return {int(key.rsplit("/", 1)[-1]): value for key, value in client.key_value_dir_get(name)}


def silent_since(limit: float) -> Callable[[dict[int, str], float], list[int]]:
    """A function of (each host's counter, the time in seconds) that returns the hosts without a change for `limit`."""
    changed: dict[int, tuple[str, float]] = {}

    def judge(seen: dict[int, str], now: float) -> list[int]:
        for host, value in seen.items():
            if host not in changed or changed[host][0] != value:
                changed[host] = value, now
        return [host for host, (_, when) in changed.items() if now - when > limit]

    return judge


def _leave(text: str, status: int) -> None:
    """End this process with a line, whatever its main thread waits for."""
    advice = "; what is saved is good: jaxrl train --resume RUN goes on" if status == LOST else ""
    print(f"error: {text}{advice}", file=sys.stderr, flush=True)
    os._exit(status)
