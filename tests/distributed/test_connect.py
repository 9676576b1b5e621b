"""The coordination service in a process of its own: alone at its port, and gone once no host needs it."""

from __future__ import annotations

import socket
import time

import pytest

from experiments.benchmarks.hosts import free_port
from jaxrl_llm.distributed import connect
from jaxrl_llm.distributed.connect import Service

PATIENCE = 120.0


def test_a_port_in_use_is_waited_for_and_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "WAITING", 0.0)
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(RuntimeError, match=f"port {port} is in use: Address already in use"):
            connect._wait_for_port(port)
    connect._wait_for_port(port)


def test_it_outlives_its_host_only_while_another_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connect, "LINGER", 1e6)
    port = free_port()
    service = Service(f"[::]:{port}", 2, heartbeat_timeout=60, shutdown_timeout=5, recoverable=True)
    until = time.monotonic() + PATIENCE
    while True:
        try:
            other = socket.create_connection(("localhost", port), timeout=5)
            break
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.1)
    assert service.process.stdin is not None
    service.process.stdin.close()  # as when the host dies
    with other:
        time.sleep(1.0)
        assert service.process.poll() is None
    assert service.process.wait(PATIENCE) == 0
