"""A lock on a run's folder, so that only one process at a time writes to it."""

import errno
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jaxrl_llm.models.io.folders import is_alive
from jaxrl_llm.utils.errors import InputError

NAME = "run.lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. It is released when the process ends, so a killed process leaves no stale lock.

    Raises InputError, "in use by process N on host H", if another process holds it. On a file system without locks,
    checks instead whether the process named in the file is alive; one on another host is assumed to be.
    """
    path = folder / NAME
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        held = _lock(file)
        try:
            held = held and os.path.samestat(os.fstat(file), os.stat(path))
        except OSError:  # its last owner has just removed it
            held = False
        if not held:
            owner = _owner(file)
            who = f"process {owner.get('process', 'unknown')} on host {owner.get('host', 'unknown')}"
            raise InputError(
                f"{folder} is in use by {who}: wait until it is done, or stop it; if that process no longer exists, "
                f"remove {path}"
            )
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps({"process": os.getpid(), "host": socket.gethostname()}).encode(), 0)
        try:
            yield
        finally:
            with suppress(OSError):
                path.unlink()
    finally:
        os.close(file)


def _lock(file: int) -> bool:
    """Try to take the lock; returns whether this process holds it."""
    try:
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except (ImportError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
    owner = _owner(file)  # the file system has no locks
    if not owner or owner.get("process") == os.getpid():
        return True
    return owner.get("host") == socket.gethostname() and not is_alive(owner.get("process"))


def _owner(file: int) -> dict[str, Any]:
    with suppress(ValueError):
        if isinstance(owner := json.loads(os.pread(file, 1000, 0)), dict):
            return owner
    return {}
