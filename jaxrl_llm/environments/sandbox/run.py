"""Run code in the sandbox, once: start it, watch its limits, and return what it wrote."""

from __future__ import annotations

import os
import selectors
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.environments.sandbox.layers import (
    CHILD,
    OF_ROOT,
    UNSHARE,
    as_another_user,
    available,
    bubblewrap,
    counts_processes,
    require_guards,
    unshare,
)

TICK = 0.02  # seconds between two looks at memory and processes
MEBIBYTE = 2**20
# Users that no system has; each sandbox has one, because the kernel counts the processes of a user.
FIRST_USER, USERS = 1_000_000_000, 1_000_000
_USERS = count(os.getpid() * 997)


@dataclass(frozen=True)
class Limits:
    """What the code may use."""

    seconds: float = 5.0
    """Of wall-clock time, for a run or for a block of a session."""
    memory: int = 512
    """Mebibytes, of all its processes together."""
    processes: int = 16
    """At the same time, threads not counted."""
    output: int = 2**20
    """Bytes that it may write to stdout and stderr each; what is more is dropped."""
    disk: int = 16
    """Mebibytes of files."""


USUAL = Limits()


class Result(NamedTuple):
    """What code did. Exit code 0 is no success: compare what it wrote with what is wanted."""

    stdout: str
    stderr: str
    status: int | None
    """Exit code; negative: the signal that ended it; None: it was killed at a limit."""
    stopped: str | None
    """The limit at which it was killed: "seconds", "memory", "processes"; None: it ended by itself."""
    seconds: float
    """Wall-clock time."""


def run_code(
    code: str,
    stdin: str = "",
    files: Mapping[str, str] | None = None,
    limits: Limits = USUAL,
    layers: Iterable[str] | None = None,
    weak: bool = False,
    readable: Iterable[str] = (),
) -> Result:
    """Run Python code in a process of its own, in an empty folder.

    files: texts in that folder, by name. layers: by default all that the system has. weak: run it although too few of
    them hold. readable: folders beside Python's own that the code may read, such as those of packages.

    Raises InputError where the layers leave untrusted code a way out, unless weak.
    """
    box = Box(limits, layers, weak, readable)
    try:
        process = box.start(code=code, files=files or {})
        return watch(process, box, stdin.encode())
    finally:
        box.close()


class Box:
    """A folder, the command that runs code there, and its limits."""

    def __init__(
        self, limits: Limits, layers: Iterable[str] | None = None, weak: bool = False, readable: Iterable[str] = ()
    ) -> None:
        self.limits = limits
        self.layers = available() if layers is None else frozenset(layers)
        if not weak:
            require_guards(self.layers)
        self.own = "namespaces" in self.layers
        self.user = FIRST_USER + next(_USERS) % USERS if self.own and as_another_user() else None
        self.folder = tempfile.mkdtemp(prefix="sandbox-")
        # The interpreter's own files: the base of a virtual environment, whose links lead there.
        paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib")} | {
            sys.base_prefix,
            sys.base_exec_prefix,
        }
        system = {path for path in ("/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache") if os.path.exists(path)}
        self.readable = sorted({*system, *(path for path in paths if path), *readable, str(CHILD)})

    def settings(self, **run: Any) -> str:
        """For the child; see `child.main`."""
        memory, disk = self.limits.memory * MEBIBYTE, self.limits.disk * MEBIBYTE
        wrapped = self.own and bubblewrap() is not None
        # Threads count as processes here; those that the limit allows are looked for by `over`.
        tasks = 8 * self.limits.processes if counts_processes(self.layers) else 4096
        limits = {
            "AS": memory, "CPU": int(self.limits.seconds) + 1, "FSIZE": disk, "NOFILE": 64, "CORE": 0, "NPROC": tasks,
        }  # fmt: skip
        if run.get("session"):
            del limits["CPU"]  # its seconds are those of a block
        return ascii({
            "layers": sorted(self.layers), "limits": limits, "readable": self.readable, "disk": disk,
            "folder": "/box" if wrapped else self.folder, "own_folder": self.own and not wrapped,
            "session": False, "code": "", "files": {}, "user": self.user, **run,
        })  # fmt: skip

    def command(self, settings: str) -> list[str]:
        """The command that runs the child in its namespaces, if it has any."""
        python = str(Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}")
        if not os.path.exists(python):
            python = os.path.realpath(sys.executable)
        inner = [python, "-P", "-s", "-S", str(CHILD), settings]
        if not self.own:
            return inner
        if (wrap := bubblewrap()) is None:
            found = unshare()
            assert found is not None  # `available` has tried it
            return [found, *UNSHARE, *inner]
        namespaces = OF_ROOT if self.user is not None else ("--unshare-all",)
        command = [wrap, *namespaces, "--die-with-parent", "--new-session", "--as-pid-1"]
        parents = {str(one) for path in self.readable for one in Path(path).parents} - {"/"}
        for parent in sorted(parents - set(self.readable)):  # another user has to get through them
            command += ["--perms", "0755", "--dir", parent]
        for path in self.readable:
            if os.path.islink(path):
                command += ["--symlink", os.readlink(path), path]
            else:
                command += ["--ro-bind-try", path, path]
        command += ["--proc", "/proc", "--dev", "/dev", "--size", str(self.limits.disk * MEBIBYTE)]
        command += ["--perms", "0777", "--tmpfs", "/box"]
        return [*command, "--chdir", "/box", *inner]

    def start(self, **run: Any) -> subprocess.Popen[bytes]:
        """Start the child. Its hashes are always the same, so that sets have one order."""
        environment = {
            "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": "/box", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
        }  # fmt: skip
        return subprocess.Popen(
            self.command(self.settings(**run)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment, cwd="/", start_new_session=True, close_fds=True,
        )  # fmt: skip

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self.folder, ignore_errors=True)


def family(pid: int) -> list[int]:
    """A process and all that descend from it, as far as their parents live."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with suppress(OSError, ValueError):
                text = Path("/proc", entry, "stat").read_text()
                children.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(entry))
    found, left = [], [pid]
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found


def resident(pids: Iterable[int]) -> int:
    """Bytes of memory that these processes hold, shared memory counted once for each."""
    pages = 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            pages += int(Path("/proc", str(pid), "statm").read_text().split()[1])
    return pages * resource_page()


def resource_page() -> int:
    """Bytes of a page of memory."""
    return os.sysconf("SC_PAGE_SIZE")


def kill(process: subprocess.Popen[bytes]) -> None:
    """End a process, its group and its descendants."""
    if process.poll() is None:
        for pid in family(process.pid)[::-1]:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
    with suppress(OSError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


def over(process: subprocess.Popen[bytes], limits: Limits) -> str | None:
    """The limit of memory or processes that they exceed together; None if none."""
    pids = family(process.pid)
    if len(pids) - 2 > limits.processes:  # beside the wrapper and the child itself
        return "processes"
    return "memory" if resident(pids) > limits.memory * MEBIBYTE else None


def watch(process: subprocess.Popen[bytes], box: Box, stdin: bytes) -> Result:
    """Wait for the end of a process or of its time. Its output is read on, so that it never blocks, and cut."""
    limits, began = box.limits, time.monotonic()
    out: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
    stopped, deadline = None, began + limits.seconds
    with selectors.DefaultSelector() as ready:
        for name in out:
            pipe = getattr(process, name)
            os.set_blocking(pipe.fileno(), False)
            ready.register(pipe, selectors.EVENT_READ, name)
        assert process.stdin is not None
        os.set_blocking(process.stdin.fileno(), False)
        ready.register(process.stdin, selectors.EVENT_WRITE, "stdin")
        looked, ended = began, False
        while ready.get_map():
            now = time.monotonic()
            if now >= deadline:
                stopped = None if ended else "seconds"
                break
            for key, _ in ready.select(min(TICK, deadline - now)):
                if key.data == "stdin":
                    stdin = _wrote(process, stdin)
                    if not stdin:
                        ready.unregister(process.stdin)
                        with suppress(OSError):
                            process.stdin.close()
                    continue
                data = os.read(key.fd, 65536)
                if not data:
                    ready.unregister(key.fileobj)
                out[key.data] += data[: max(0, limits.output - len(out[key.data]))]
            if not ended and process.poll() is not None:
                # What is left holds the pipes open: it gets no more than a moment.
                ended, deadline = True, min(deadline, time.monotonic() + 0.1)
            elif now - looked > TICK:
                looked = now
                if (stopped := over(process, limits)) is not None:
                    break
        for key in list(ready.get_map().values()):
            if ended and key.data != "stdin":  # what a busy machine left no time for, at most what a pipe holds
                with suppress(OSError):
                    out[key.data] += os.read(key.fd, 65536)[: max(0, limits.output - len(out[key.data]))]
    if process.poll() is None and stopped is None:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            stopped = "seconds"
    kill(process)
    status = process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        with suppress(OSError):
            pipe.close()  # type: ignore[union-attr]
    texts = [out[name].decode("utf-8", "replace") for name in ("stdout", "stderr")]
    return Result(texts[0], texts[1], None if stopped else status, stopped, time.monotonic() - began)


def _wrote(process: subprocess.Popen[bytes], data: bytes) -> bytes:
    """What is left of `data` after as much as the pipe takes; nothing if it is closed."""
    assert process.stdin is not None
    if not data:
        return b""
    try:
        return data[os.write(process.stdin.fileno(), data[:65536]) :]
    except BlockingIOError:
        return data
    except OSError:
        return b""
