"""Checkpoints go from one mesh to another, and from one number of processes to another."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from experiments.launch import local

PROGRAM = Path(__file__).with_name("on_devices.py")


def run(folder: Path, processes: int, mesh: str, *actions: str) -> list[str]:
    """What the program prints, sorted; mesh: of the devices of all processes."""
    devices = int(np.prod([int(size) for size in mesh.split("x")]))
    command = [sys.executable, str(PROGRAM), str(folder), mesh, *actions]
    launcher = [sys.executable, local.__file__, "--processes", str(processes), "--devices", str(devices // processes)]
    command = [*launcher, "--", *command] if processes > 1 else command
    environment = {**os.environ, **local.environment("cpu", 0, devices, os.environ.get("XLA_FLAGS", ""))}
    environment = environment if processes == 1 else {**os.environ}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    words = ("saved", "restored", "refused")
    return sorted(line for line in done.stdout.splitlines() if any(word in line for word in words))


def both(line: str) -> list[str]:
    return [f"[{process}] {line}" for process in range(2)]


@pytest.mark.heavy
def test_two_processes_save_and_others_restore_and_the_reverse(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    found = run(folder, 2, "4x1", "save:1", "save:2", "restore", "refuse")
    no = "this process does not want it"
    refused = [f"[0] refused process 1: {no}", f"[1] refused {no}"]
    assert found == sorted([*both("saved [1]"), *both("saved [1, 2]"), *both("restored 2"), *refused])
    # One process, one device.
    assert run(folder, 1, "1x1", "restore") == ["restored 2"]
    # One process, eight devices; what it saves goes to two processes with another mesh.
    assert run(folder, 1, "2x4", "restore", "save:3") == ["restored 2", "saved [1, 2, 3]"]
    assert run(folder, 2, "2x2", "restore", "damage:3", "restore") == sorted(both("restored 3") + both("restored 2"))
