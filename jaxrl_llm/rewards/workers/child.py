"""The process of a reward function, as the trainer sees it: it is started, asked, and killed."""

import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.rewards.workers.worker import receive, send_value

_PROGRAM = (
    "import sys; sys.path[:] = sys.argv[3:]; from jaxrl_llm.rewards.workers.worker import main; "
    "main(int(sys.argv[1]), int(sys.argv[2]))"
)


class Child(NamedTuple):
    """A process that loads a function, or has."""

    process: subprocess.Popen[bytes]  # leader of its process group
    connection: socket.socket
    life: int  # write end of a pipe: the process exits when it is closed, see `worker`


class ProcessEnded(Exception):
    """A process did not answer; it has exited or must be killed. The message continues the words "its process"."""

    late = False  # whether it exceeded a limit


class TooLarge(ProcessEnded):
    """A process took more memory than it may."""

    late = True


def start_child(name: str | bytes, folder: str, path: Sequence[str]) -> Child:
    """Start a process that loads the function of a name, or a pickled one. folder: its own; path: its sys.path."""
    ours, its = socket.socketpair()
    other_end, life = os.pipe()
    try:
        process = subprocess.Popen(
            # -P: files in the folder must not shadow modules before the program has set sys.path.
            [sys.executable, "-P", "-c", _PROGRAM, str(its.fileno()), str(other_end), *path],
            pass_fds=(its.fileno(), other_end),
            stdin=subprocess.DEVNULL,
            stdout=2,  # output of a reward must not mix with the trainer's
            cwd=folder,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
            start_new_session=True,  # Ctrl-C is only for the trainer
        )
    except BaseException:
        ours.close()
        os.close(life)
        raise
    finally:
        its.close()
        os.close(other_end)
    with contextlib.suppress(OSError):  # it may have exited already, which `ask` detects
        send_value(ours, name)
    return Child(process, ours, life)


def ask(child: Child, message: Any, seconds: float, memory_limit: float | None) -> Any:
    """Send a message, unless it is None, and wait for the answer. After Ended or TimeoutError it cannot be used."""
    deadline = None if math.isinf(seconds) else time.monotonic() + seconds

    def look() -> None:
        if has_ended(child):
            raise EOFError  # its children may keep the connection open
        most = machine_memory() / 2 if memory_limit is None else memory_limit
        if resident(child.process.pid) > most:
            raise TooLarge(f"took more than {most / 1e9:.3g} GB and was ended")

    try:
        if message is not None:
            send_value(child.connection, message, deadline)
        return receive(child.connection, deadline, look)
    except (ProcessEnded, TimeoutError):
        raise
    except Exception as error:  # the connection is closed, or the reward wrote something else to it
        kill(child)
        raise ProcessEnded(how_it_ended(child.process)) from error


def has_ended(child: Child) -> bool:
    """Whether the process has exited. It is not reaped, so that its id cannot be reused."""
    return os.waitid(os.P_PID, child.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def how_it_ended(process: subprocess.Popen[bytes]) -> str:
    """In words that continue "its process"."""
    status = process.wait()
    if status >= 0:
        return f"ended with status {status}"
    with contextlib.suppress(ValueError):
        return f"ended by signal {-status} ({signal.Signals(-status).name})"
    return f"ended by signal {-status}"


def kill(child: Child) -> None:
    """Kill the process and its children. A process that has already exited keeps its status."""
    if child.process.returncode is None:  # else its id may belong to another process by now
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.process.pid, signal.SIGKILL)


def end(child: Child, owner: int) -> None:
    """Kill the process and release what belongs to it. owner: id of the process that started it."""
    if os.getpid() != owner:  # a fork of the trainer must not kill the trainer's processes
        return
    kill(child)
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.process.wait(5)
    child.connection.close()
    os.close(child.life)


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
