"""Memory of the machine, and of a process with its children."""

from __future__ import annotations

import os
from pathlib import Path

_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))  # of a container


def machine_memory() -> int:
    """Bytes of memory of this machine, or of the container that this process runs in."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in _LIMITS:
        try:
            found.append(int(path.read_text()))
        except (OSError, ValueError):  # no limit, or "max"
            continue
    return min(found)


def resident(process: int) -> int:
    """Resident bytes of a process and its children; 0 on systems without /proc."""
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
