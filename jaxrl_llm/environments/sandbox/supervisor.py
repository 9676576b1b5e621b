"""Start a supervisor (`inside.supervise`) and speak with it: settings and requests go by a pipe, results come back."""

import importlib.util
import os
import platform
import secrets
import select
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from jaxrl_llm.environments.sandbox.inside.confine import BOX, FOLDER
from jaxrl_llm.environments.sandbox.inside.interpret import message
from jaxrl_llm.environments.sandbox.inside.process import remove
from jaxrl_llm.environments.sandbox.inside.watch import THREADS
from jaxrl_llm.environments.sandbox.system_calls import OWN_PID, filter_program
from jaxrl_llm.utils.errors import InputError

MEBIBYTE = 2**20
GRACE = 30.0  # seconds beside its limit in which a supervisor must have answered, on a busy machine too
# Users that no system has; each sandbox has one, because the kernel counts the processes of a user.
FIRST_USER, USERS = 1_000_000_000, 1_000_000
_USERS = count(os.getpid() * 997)
PROGRAMS = ("inside", "inside.confine", "inside.interpret", "inside.watch", "inside.process", "inside.supervise")
# Their code is read from stdin: looking for modules takes longer than all else that a start does before them.
START = """
import marshal, os, sys
def read(count):
    data = b""
    while len(data) < count and (more := os.read(0, count - len(data))): data += more
    return data
for name, code in marshal.loads(read(int.from_bytes(read(8), "little"))):
    made = sys.modules[name] = type(sys)(name)
    made.__package__, made.__path__ = "inside", []
    exec(code, made.__dict__)
made.main()
"""


@dataclass(frozen=True)
class Limits:
    """What the code may use."""

    seconds: float = 5.0
    """Of wall-clock time, for a run or for a block of a session. Between blocks its processes stand still."""
    memory: int = 512
    """Mebibytes, of all its processes together."""
    processes: int = 16
    """That it has started, at the same time, and eight times as many threads."""
    output: int = 2**20
    """Bytes that it may write to stdout and stderr each; what is more is dropped."""
    disk: int = 16
    """Mebibytes of files, which are in memory, beside that of its processes, where there are namespaces."""


class Result(NamedTuple):
    """What code did. Exit code 0 is no success: compare what it wrote with what is wanted."""

    stdout: str
    stderr: str
    status: int | None
    """Exit code; negative: the signal that ended it; None: it was killed at a limit."""
    stopped: str | None
    """The limit at which it was killed: "seconds", "memory", "processes", "disk"; None: it ended by itself."""
    seconds: float
    """Wall-clock time."""


@dataclass(frozen=True)
class SandboxSettings:
    """Of a sandbox. code: a program; or the first block of a session."""

    layers: frozenset[str]
    limits: Limits = Limits()
    readable: tuple[str, ...] = ()
    session: bool = False
    code: str = ""
    stdin: bytes = b""
    files: Mapping[str, str] = field(default_factory=dict)


@cache
def _programs() -> bytes:
    out = []
    for name in PROGRAMS:
        found = importlib.util.find_spec(f"{__package__}.{name}")
        loader: Any = found.loader if found is not None else None
        out.append((name, loader.get_code(f"{__package__}.{name}")))
    return message(out)


@cache
def memory_groups() -> str | None:
    """The cgroup (version 2) below which this process may make others that limit memory; None without one."""
    try:
        own = next(line[3:] for line in Path("/proc/self/cgroup").read_text().splitlines() if line.startswith("0::"))
        kinds = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        base = Path(next(words[1] for words in kinds if words[2] == "cgroup2")) / own.strip("/")
    except (OSError, StopIteration):
        return None
    return next((str(one) for one in (base, base.parent) if _limits_memory(one / f"sandbox-{os.getpid()}")), None)


def _limits_memory(group: Path) -> bool:
    """Whether a group can be made here, limits memory, and may be joined."""
    try:
        group.mkdir()
    except OSError:
        return False
    try:
        join = ["sh", "-c", f"echo 0 > '{group / 'cgroup.procs'}'"]
        joined = subprocess.run(join, capture_output=True, check=False).returncode == 0
        return joined and (group / "memory.max").exists()
    finally:
        with suppress(OSError):
            group.rmdir()


@cache
def _may_be_others() -> bool:
    """Whether this is root of a namespace that has `FIRST_USER`."""
    if os.geteuid() != 0:
        return False
    try:
        lines = [[int(word) for word in line.split()] for line in Path("/proc/self/uid_map").read_text().splitlines()]
    except (OSError, ValueError):
        return False
    return any(first <= FIRST_USER and first + many >= FIRST_USER + USERS for first, _, many in lines)


def _python() -> str:
    """The interpreter itself: the base of a virtual environment, whose links lead there."""
    found = Path(sys.base_prefix) / "bin" / f"python{sys.version_info[0]}.{sys.version_info[1]}"
    return str(found) if found.exists() else os.path.realpath(sys.executable)


@cache
def _system() -> tuple[str, ...]:
    """Paths that Python itself reads."""
    own = {sysconfig.get_path("stdlib"), sys.base_prefix, sys.base_exec_prefix}
    system = {"/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", *own}
    return tuple(path for path in system if os.path.exists(path))


def _outermost(paths: Iterable[str]) -> list[str]:
    """Without those that lie in others."""
    out: list[str] = []
    for path in sorted(set(paths)):
        if not out or not path.startswith(out[-1].rstrip("/") + "/"):
            out.append(path)
    return out


def readable_paths(readable: Iterable[str]) -> tuple[str, ...]:
    """Absolute paths that code may read. InputError for what is no list of paths, and for what is all of the host."""
    if isinstance(readable, str | bytes | os.PathLike):
        raise InputError(f"readable is {readable!r}, but must be a list of folders: write [{str(readable)!r}]")
    out = tuple(os.path.abspath(path) for path in readable)
    for path in out:
        if os.path.realpath(path) == "/" or path == BOX or path.startswith(f"{BOX}/"):
            raise InputError(f"readable has {path!r}, which would show too much: name the folders that the code needs")
        if not os.path.exists(path):
            raise InputError(f"readable has {path!r}, which does not exist")
    return out


def checked_files(files: Mapping[str, str], limits: Limits) -> dict[str, str]:
    """Files of the sandbox's folder. InputError for a name that leads out of it, and for more than fits."""
    for name, text in files.items():
        parts = name.split("/") if isinstance(name, str) else [""]
        if not isinstance(text, str) or name.startswith("/") or "\0" in name or {"", ".."} & {*parts}:
            raise InputError(f"files has {name!r}, but wants texts by a name within the sandbox's folder, without '..'")
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in files.values())
    if size > limits.disk * MEBIBYTE:
        raise InputError(f"files has {size:,} bytes, but the limit `disk` is {limits.disk} MiB")
    return dict(files)


class Supervisor:
    """A supervisor that has been started, with the request of its settings."""

    def __init__(self, settings: SandboxSettings) -> None:
        """OSError where no process can be started."""
        self.limits, self.ended, own = settings.limits, False, "namespaces" in settings.layers
        self._folder = "" if own else os.path.join(tempfile.gettempdir(), f"sandbox-{secrets.token_hex(8)}")
        folder = FOLDER if own else self._folder
        self._unsent = _programs() + message(self._told(settings, folder))
        environment = {
            "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "HOME": folder, "TMPDIR": f"{BOX}/tmp" if own else folder,
            "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
        }  # fmt: skip
        self.process = subprocess.Popen(
            [_python(), "-P", "-s", "-S", "-c", START], stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, cwd="/", start_new_session=True,
        )  # fmt: skip

    def _told(self, settings: SandboxSettings, folder: str) -> dict[str, Any]:
        """For the supervisor: plain values, memory and files in bytes."""
        limits, layers = settings.limits, settings.layers
        own, memory, disk = "namespaces" in layers, limits.memory * MEBIBYTE, limits.disk * MEBIBYTE
        tasks = THREADS * limits.processes
        kernel = {"AS": memory, "CPU": int(limits.seconds) + 1, "FSIZE": disk, "NOFILE": 64, "CORE": 0}
        if settings.session:
            del kernel["CPU"]  # its seconds are those of a block
        if own:
            kernel["NPROC"] = tasks  # of this user and, but for namespaces, all that it has
        user = FIRST_USER + next(_USERS) % USERS if own and _may_be_others() else None
        return {
            "layers": sorted(layers), "namespaces": own, "session": settings.session, "owner": os.getpid(),
            "limits": kernel, "memory": memory, "disk": disk, "seconds": limits.seconds, "output": limits.output,
            "processes": limits.processes, "tasks": tasks, "readable": _outermost([*_system(), *settings.readable]),
            "folder": folder, "user": user, "group": memory_groups() if "limits" in layers else None,
            "filter": filter_program(platform.machine(), own) if "seccomp" in layers else b"", "own_pid": OWN_PID,
            "code": settings.code, "stdin": settings.stdin, "files": dict(settings.files),
        }  # fmt: skip

    def ask(self, code: str | None, seconds: float) -> Result:
        """The result of the settings' request, or of a further block. OSError where the sandbox did not start.

        seconds: to wait beside the limit.
        """
        if code is not None:
            self._unsent += message(code)
        head, said = self._exchange(time.monotonic() + self.limits.seconds + seconds)
        if head is None:
            self.process.kill()
            self.ended = True
            return Result("", "", None, "seconds", self.limits.seconds)
        if not head:
            raise OSError("the sandbox ended without a result: this machine may lack memory or processes")
        if head[0] == "failed":
            raise OSError(f"the sandbox did not start: {said.decode('utf-8', 'replace')}")
        self.ended, size = head[3] == "0", int(head[4])
        texts = [part.decode("utf-8", "replace") for part in (said[:size], said[size:])]
        status = None if head[0] == "-" else int(head[0])
        return Result(texts[0], texts[1], status, None if head[1] == "-" else head[1], float(head[2]))

    def _exchange(self, deadline: float) -> tuple[list[str] | None, bytes]:
        """Send what is to be sent, and read the words and the bytes of a result. No words at its end, None too late."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        os.set_blocking(stdin.fileno(), False)
        waiting, said = select.poll(), bytearray()
        waiting.register(stdout.fileno(), select.POLLIN)
        if self._unsent:
            waiting.register(stdin.fileno(), select.POLLOUT)
        while (left := deadline - time.monotonic()) > 0:
            for descriptor, _ in waiting.poll(left * 1000):
                if descriptor == stdout.fileno():
                    data = os.read(descriptor, 2**20)
                    if not data:
                        return [], b""
                    said += data
                    line, found, rest = said.partition(b"\n")
                    words = line.decode("ascii", "replace").split()
                    if found and len(rest) >= sum(int(word) for word in words[1 if words[0] == "failed" else 4 :]):
                        return words, bytes(rest)
                    continue
                try:
                    self._unsent = self._unsent[os.write(descriptor, self._unsent[: 2**16]) :]
                except BlockingIOError:
                    continue
                except OSError:
                    self._unsent = b""
                if not self._unsent:
                    waiting.unregister(descriptor)
        return None, b""

    def close(self) -> None:
        """End it, and all that it has started."""
        process = self.process
        with suppress(OSError):
            process.stdin.close()  # type: ignore[union-attr]
        try:
            process.wait(5.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with suppress(OSError):
            process.stdout.close()  # type: ignore[union-attr]
        if self._folder:
            remove(self._folder)
