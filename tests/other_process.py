"""Programs that run in processes of their own: on several CPU devices, or compiled for chips that are not here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from compiling import FLAGS, with_devices

ROOT = Path(__file__).parents[1]


def on_devices(count: int, quick: bool = False) -> dict[str, str]:
    """The environment of a process with so many CPU devices, which imports this checkout and compiles as this one.

    quick: with few optimisations, also where OPTIMISED is set.
    """
    path = os.pathsep.join([str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")])
    own = {"XLA_FLAGS": with_devices(count), "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    return os.environ | own | (FLAGS if quick else {})


def result_of(program: str, *arguments: str, environment: Mapping[str, str], timeout: float = 900) -> Any:
    """What a program prints as JSON after RESULT. arguments: those that it has in sys.argv."""
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "RESULT" in done.stdout, done.stderr[-3000:]
    return json.loads(done.stdout.split("RESULT")[1])
