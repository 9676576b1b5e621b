"""What the processes of a sandbox hold together, seen from outside of it."""

from __future__ import annotations

import os
import resource
import stat
import time

TYPE_CHECKING = False  # as in typing
if TYPE_CHECKING:
    from typing import Any

KIBIBYTE, PAGE = 1024, os.sysconf("SC_PAGE_SIZE")
SOCKET, PIPE = 212_992, 65_536  # bytes that the kernel keeps for each, at most
TICK, SOON, OFTEN = 0.01, 0.001, 5  # seconds between looks, and how many of them are without the dearest part
ENTRIES = 10_000  # files in a folder that is looked through
THREADS = 8  # for each process that is allowed
KILL, STOP, GO_ON = 9, 19, 18


def _all() -> set[int]:
    return {int(name) for name in os.listdir("/proc") if name.isdigit()}


class Processes:
    """A process and all that descend from it, as /proc shows them."""

    def __init__(self, root: int, new: bool = False) -> None:
        """root: the number of the first. new: it has started none yet."""
        self._root, self._others = root, _all() - {root} if new else set[int]()

    def members(self) -> list[int]:
        """Their numbers, as far as their parents live."""
        entries = _all()
        parents = {pid: int(fields[1]) for pid in entries - self._others if (fields := state(pid))}
        out = {self._root} & entries
        while new := {pid for pid, up in parents.items() if up in out and pid not in out}:
            out |= new
        self._others = (self._others & entries) | (parents.keys() - out)  # those of others are looked at once
        return sorted(out)


def text(pid: int, name: str) -> str:
    """A file of a process. OSError where it has ended, or may not be looked at."""
    with open(f"/proc/{pid}/{name}", errors="surrogateescape") as opened:
        return opened.read()


def state(pid: int) -> list[str]:
    """The fields of its file "stat", from its state on; empty if it has ended."""
    try:
        return text(pid, "stat").rpartition(")")[2].split()
    except OSError:
        return []


def descriptors(pid: int) -> list[os.stat_result]:
    """What it has opened; nothing if that may not be looked at."""
    out: list[os.stat_result] = []
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return out
    for name in names:
        try:
            out.append(os.stat(f"/proc/{pid}/fd/{name}"))
        except OSError:
            continue
    return out


def family(pid: int) -> list[int]:
    """A process and all that descend from it, as far as their parents live."""
    return Processes(pid).members()


def signalled(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    try:  # noqa: SIM105  (contextlib takes a moment to import)
        os.kill(pid, number)
    except OSError:
        pass


def pages(pid: int) -> list[int]:
    """Its file "statm" in bytes: all addresses, resident, shared, text, 0, data that it may write, 0."""
    try:
        return [int(word) * PAGE for word in text(pid, "statm").split()]
    except OSError:
        return [0] * 7


def private(pids: list[int]) -> int:
    """Bytes of memory that they hold of their own, what several have in common counted once."""
    total = 0
    for pid in pids:
        try:
            lines = text(pid, "smaps_rollup").splitlines()[1:]
            sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
            total += (sizes.get("Pss_Anon", sizes["Pss"]) + sizes.get("SwapPss", 0)) * KIBIBYTE
        except OSError:
            total += pages(pid)[1]
        except (ValueError, IndexError, KeyError):
            continue  # it has just ended
    return total


def nameless(pids: list[int]) -> dict[tuple[int, int], int]:
    """Bytes of what no folder shows, by device and number, each once: what may be common to several processes.

    Memfds, shared memory that is mapped, unlinked files; pipes and sockets, as full as they can be.
    """
    out: dict[tuple[int, int], int] = {}
    for pid in pids:
        for found in descriptors(pid):
            key = found.st_dev, found.st_ino
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                out[key] = found.st_blocks * 512
            elif stat.S_ISSOCK(found.st_mode) or stat.S_ISFIFO(found.st_mode):
                out[key] = SOCKET if stat.S_ISSOCK(found.st_mode) else PIPE
        try:
            lines = text(pid, "maps").splitlines()
        except OSError:
            continue
        for line in lines:
            area, rights, offset, device, inode, *path = line.split(maxsplit=5)
            if inode != "0" and rights[3] == "s" and path and path[0].endswith("(deleted)"):
                first, last = (int(end, 16) for end in area.split("-"))
                major, minor = (int(part, 16) for part in device.split(":"))
                key = os.makedev(major, minor), int(inode)
                out[key] = max(out.get(key, 0), int(offset, 16) + last - first)
    return out


def files(folder: str, most: int) -> int:
    """Bytes of the files of a folder; more than `most` where there are too many."""
    total, count, left = 0, 0, [folder]
    while left:
        try:
            with os.scandir(left.pop()) as entries:
                for entry in entries:
                    count += 1
                    if entry.is_dir(follow_symlinks=False):
                        left.append(entry.path)
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if total > most or count > ENTRIES:
                        return max(total, most + 1)
        except OSError:
            continue
    return total


class Watch:
    """Looks at the processes of a sandbox every so often, and says which limit they exceed.

    With limits and the filter of system calls the kernel bounds the memory of one process, and there is none but that
    of processes, files, pipes and sockets. Several then have parts of it, which the kernel bounds too.
    """

    def __init__(self, outside: set[int], settings: dict[str, Any]) -> None:
        """outside: this process and others that are not the code's. settings: see `supervisor.Supervisor`."""
        self.outside, self._family, self._limits = outside, Processes(os.getpid(), new=True), settings
        self._bounded = {"limits", "seccomp"} <= set(settings["layers"])
        self._folder = None if settings["namespaces"] else settings["folder"]
        self._looks, self._extra, self.next = 0, 0, time.monotonic() + TICK

    def members(self) -> list[int]:
        """The code's processes."""
        return [pid for pid in self._family.members() if pid not in self.outside]

    def over(self) -> str | None:
        """The limit that they exceed together, None if none; looks only if it is time."""
        began = time.monotonic()
        if began < self.next:
            return None
        pids, limits = self.members(), self._limits
        found, fits = None, True
        self._looks += 1
        if len(pids) - 1 > limits["processes"] or _threads(pids) > THREADS * limits["processes"]:
            found = "processes"
        elif len(pids) > 1 or not self._bounded:
            fits = self._share(pids)
            if not fits and self._held(pids) + self._extra > limits["memory"]:
                found = "memory"
        elif self._folder is not None and self._disk(pids) > limits["disk"]:
            found = "disk"
        # As often as looking takes no more than an eighth of the time, or two thirds where only it bounds the memory.
        now = time.monotonic()
        pause, times = (TICK, 8) if fits else (SOON, 0.5)
        self.next = now + max(pause, times * (now - began))
        return found

    def _held(self, pids: list[int]) -> int:
        """Bytes that they hold. They stand still meanwhile: eight that write leave this process a tenth of the time."""
        for pid in pids:
            signalled(pid, STOP)
        held = private(pids)
        for pid in pids:
            signalled(pid, GO_ON)
        return held

    def _disk(self, pids: list[int]) -> int:
        assert self._folder is not None
        device = os.stat(self._folder).st_dev
        unlinked = sum(size for (place, _), size in nameless(pids).items() if place == device)
        return unlinked + files(self._folder, self._limits["disk"])

    def _share(self, pids: list[int]) -> bool:
        """Give each process an equal part of what is left of the memory, beside what it may write to now.

        False if what they may write to is too much, so that what they have written must be measured.
        """
        if self._looks % OFTEN == 0 or not self._bounded:
            self._extra = sum(nameless(pids).values())
        most = self._limits["memory"]
        data = {pid: pages(pid)[5] for pid in pids}
        left = most - self._extra - sum(data.values())
        for pid, size in data.items() if self._bounded else ():
            try:
                resource.prlimit(pid, resource.RLIMIT_DATA, (min(size + max(left, 0) // len(pids), most), most))
            except (OSError, ValueError):
                left = -1
        return left >= 0

    def kill(self) -> None:
        """Kill those that are there now, before the first process of a namespace comes to end the others."""
        for pid in self.members():
            signalled(pid, KILL)

    def stop(self) -> bool:
        """Stop them all; whether they stand still. Those that keep making others do not."""
        for attempt in range(40):
            moving = [pid for pid in self.members() if (state(pid) or ["X"])[0] not in "TtZX"]
            if not moving:
                return True
            for pid in moving:
                signalled(pid, STOP)
            time.sleep(0.0001 * attempt)
        return False

    def go_on(self) -> None:
        """Let them go on."""
        for pid in self.members():
            signalled(pid, GO_ON)
        self.next = time.monotonic() + TICK


def _threads(pids: list[int]) -> int:
    return sum(int(fields[17]) for pid in pids if (fields := state(pid)))
