"""What sandboxed programs reach for, files, sockets and a process, and whether anything happened to them."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

SITE = next((path for path in sys.path if path.endswith("site-packages") and (Path(path) / "numpy").exists()), "")


class Host:
    """Targets in a folder, and their state."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.tcp = folder, socket.create_server(("127.0.0.1", 0))
        (folder / "secret").write_text("secret")
        (folder / "plain").write_text("plain")
        (folder / "open").mkdir()  # readable by the code
        (folder / "open" / "read").write_text("read")
        (folder / "open" / "module_of_host.py").write_text("value = 1")
        for path in (folder / "plain", folder / "open" / "read"):
            with suppress(OSError):
                os.setxattr(path, "user.mark", b"1")
            os.utime(path, (1_000_000_000, 1_000_000_000))
        self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.udp.bind(("127.0.0.1", 0))
        self.name = f"sandbox-attack-{os.getpid()}"
        self.local: list[socket.socket] = []
        for kind, place in ((1, str(folder / "stream")), (2, str(folder / "datagram"))):
            for address in (place, "\0" + self.name + str(kind)):
                made = socket.socket(socket.AF_UNIX, kind)
                made.bind(address)
                if kind == 1:
                    made.listen()
                self.local.append(made)
        for one in (self.tcp, self.udp, *self.local):
            one.setblocking(False)
        self.link = next((name for name in sorted(os.listdir("/sys/class/net")) if name != "lo"), "lo")
        number = {"x86_64": 248, "aarch64": 217}.get(os.uname().machine, -1)
        ctypes.CDLL(None).syscall(number, b"user", self.name.encode(), b"secret", 6, -3)  # a key of this session
        self.victim = self._sleeper()
        self.read, self.write = os.pipe()
        os.set_inheritable(self.read, True)
        os.write(self.write, b"secret")

    @staticmethod
    def _sleeper() -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sleep", "3600"])

    @property
    def targets(self) -> dict[str, Any]:
        """For the programs, by name."""
        return {
            "folder": str(self.folder), "secret": str(self.folder / "secret"), "plain": str(self.folder / "plain"),
            "open": str(self.folder / "open"), "read": str(self.folder / "open" / "read"), "owner": os.getpid(),
            "victim": self.victim.pid, "port": self.tcp.getsockname()[1], "udp": self.udp.getsockname()[1],
            "stream": str(self.folder / "stream"), "datagram": str(self.folder / "datagram"), "name": self.name,
            "descriptor": self.read, "site": SITE, "link": self.link, "python": os.path.dirname(os.__file__),
        }  # fmt: skip

    def state(self) -> list[Any]:
        """Of all targets, for comparison."""
        files: list[Any] = []
        for path in sorted([*self.folder.iterdir(), *(self.folder / "open").iterdir(), self.folder]):
            found = path.lstat()
            text = path.read_bytes() if path.is_file() else b""
            with suppress(OSError):
                files.append([os.getxattr(path, name) for name in os.listxattr(path)])
            files.append((str(path), found.st_mode, found.st_uid, found.st_gid, found.st_mtime_ns, text))
        return [files, *(self._of(pid) for pid in (self.victim.pid, os.getpid()))]

    @staticmethod
    def _of(pid: int) -> Any:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            score = Path(f"/proc/{pid}/oom_score_adj").read_text()
            state = "stands" if fields[0] in "TtZX" else "goes"
            limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
            return (state, fields[2:4], fields[15:17], fields[38], os.sched_getaffinity(pid), limits, score)
        except OSError:
            return "gone"

    def reached(self) -> bool:
        """Whether a socket was."""
        found = False
        for one in (self.tcp, self.udp, *self.local):
            with suppress(BlockingIOError):
                if one.type == socket.SOCK_STREAM:
                    one.accept()[0].close()
                else:
                    one.recv(100)
                found = True
        return found

    def close(self) -> None:
        """End what was started."""
        self.victim.kill()
        self.victim.wait()
        for one in (self.tcp, self.udp, *self.local):
            one.close()
        os.close(self.read)
        os.close(self.write)


def named(mark: str) -> list[int]:
    """Processes of this name, or with it in their command."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            told = (path / "comm").read_text().strip() == mark or mark in (path / "cmdline").read_text()
            if state not in "ZX" and told:
                found.append(int(path.name))
    return found


def still_there(mark: str, seconds: float = 1.0) -> list[int]:
    """Processes of this name that are there for so long."""
    until = time.monotonic() + seconds
    while (found := named(mark)) and time.monotonic() < until:
        time.sleep(0.02)
    return found


def resident(pids: list[int]) -> int:
    """Bytes that processes hold of their own."""
    total = 0
    for pid in pids:
        with suppress(OSError, ValueError, IndexError):
            words = Path(f"/proc/{pid}/statm").read_text().split()
            total += (int(words[1]) - int(words[2])) * os.sysconf("SC_PAGE_SIZE")
    return total
