"""Memory of the machine and of processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jaxrl_llm.rewards.workers import child


def test_machine_memory_knows_the_limits_of_containers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for text, expected in [("max\n", whole), ("1000000\n", 1_000_000), ("9223372036854771712\n", whole)]:
        (tmp_path / "limit").write_text(text)
        monkeypatch.setattr(child, "_LIMITS", (tmp_path / "limit", tmp_path / "none"))
        assert child.machine_memory() == expected


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_resident_counts_children() -> None:
    program = (
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'x = bytes(1) * 10**8; print(flush=True); input()'])\n"
        "child.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        assert 10**8 < child.resident(parent.pid) < 3 * 10**8
        parent.communicate(b"\n")
    assert child.resident(parent.pid) == 0
