"""How much memory the machine has, and how much a process and its children hold."""

from __future__ import annotations

import os
from pathlib import Path

_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))  # of a container


def machine_memory() -> int:
    """Bytes of memory that this machine, or the container that this process runs in, has."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _LIMITS:
        try:
            found.append(int(path.read_text()))
        except (OSError, ValueError):  # there is no such limit, or it is "max"
            continue
    return min(found)


def resident(process: int) -> int:
    """Bytes that a process and its children hold in memory; 0 where the system does not tell (without /proc)."""
    try:
        pages = int(Path(f"/proc/{process}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE") + sum(map(resident, _children(process)))


def _children(process: int) -> list[int]:
    try:
        texts = [path.read_text() for path in Path(f"/proc/{process}/task").glob("*/children")]
    except OSError:  # it, or one of its threads, has ended
        return []
    return [int(child) for text in texts for child in text.split()]
