"""What the processes of a sandbox hold together, seen from outside of it."""

from __future__ import annotations

import os
import stat
import time

from .confine import call

TYPE_CHECKING = False  # as in typing
if TYPE_CHECKING:
    from typing import Any

KIBIBYTE, PAGE = 1024, os.sysconf("SC_PAGE_SIZE")
SOCKET, PIPE = 212_992, 65_536  # bytes that the kernel keeps for each, at most
TICK, QUICK, OFTEN = 0.02, 0.001, 10  # seconds between looks, and every how many the dearest are made
ENTRIES = 10_000  # files in a folder that is looked through
THREADS = 8  # for each process that is allowed
SEND_SIGNAL = 424
KILL, STOP, GO_ON = 9, 19, 18


class Processes:
    """Processes as a mount of /proc shows them: all of a namespace but its first, or those that descend from one."""

    def __init__(self, proc: int, root: int | None = None) -> None:
        """proc: a descriptor of the mount. root: the process from which they descend."""
        self._proc, self._root = proc, root
        self._others = {1} if root is None else set[int]()

    def members(self) -> list[int]:
        """Their numbers there. With a root: its own, and all that descend from it as far as their parents live."""
        entries = {int(name) for name in os.listdir(self._proc) if name.isdigit()}
        if self._root is None:
            return sorted(entries - self._others)
        parents = {pid: up for pid in entries - self._others if (up := self.field(pid, 1)) is not None}
        out = {self._root} & entries
        while new := {pid for pid, up in parents.items() if up in out and pid not in out}:
            out |= new
        self._others = (self._others & entries) | (parents.keys() - out)  # those of others are looked at once
        return sorted(out)

    def text(self, pid: int, name: str) -> str:
        """A file of a process. OSError where it has ended, or may not be looked at."""
        opened = os.open(f"{pid}/{name}", os.O_RDONLY, dir_fd=self._proc)
        try:
            parts = [os.read(opened, 2**16)]
            while parts[-1]:
                parts.append(os.read(opened, 2**16))
        finally:
            os.close(opened)
        return b"".join(parts).decode("utf-8", "surrogateescape")

    def state(self, pid: int) -> list[str]:
        """The fields of its file "stat", from its state on; empty if it has ended."""
        try:
            return self.text(pid, "stat").rpartition(")")[2].split()
        except OSError:
            return []

    def field(self, pid: int, number: int) -> int | None:
        """One of them."""
        fields = self.state(pid)
        return int(fields[number]) if fields else None

    def descriptors(self, pid: int) -> list[os.stat_result]:
        """What it has opened; nothing if that may not be looked at."""
        out: list[os.stat_result] = []
        try:
            place = os.open(f"{pid}/fd", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        except OSError:
            return out
        for name in os.listdir(place):
            try:
                out.append(os.stat(name, dir_fd=place))
            except OSError:
                continue
        os.close(place)
        return out

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to one that may be gone."""
        try:
            opened = os.open(str(pid), os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        except OSError:
            return
        try:
            call(SEND_SIGNAL, opened, number, None, 0)
        except OSError:
            pass
        finally:
            os.close(opened)


def family(pid: int) -> list[int]:
    """A process and all that descend from it, as far as their parents live."""
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
    try:
        return Processes(proc, pid).members()
    finally:
        os.close(proc)


def resident(held: Processes, pids: list[int]) -> int:
    """Bytes of memory that they hold of their own, at most: what several have in common counts for each."""
    total = 0
    for pid in pids:
        try:
            words = held.text(pid, "statm").split()
            total += (int(words[1]) - int(words[2])) * PAGE
        except (OSError, IndexError):
            continue
    return total


def private(held: Processes, pids: list[int]) -> int:
    """Bytes of memory that they hold of their own, what several have in common counted once."""
    total = 0
    for pid in pids:
        try:
            lines = held.text(pid, "smaps_rollup").splitlines()[1:]
            sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
            total += (sizes.get("Pss_Anon", sizes["Pss"]) + sizes.get("SwapPss", 0)) * KIBIBYTE
        except OSError:
            total += resident(held, [pid])
        except (ValueError, IndexError, KeyError):
            continue  # it has just ended
    return total


def nameless(held: Processes, pids: list[int]) -> dict[tuple[int, int], int]:
    """Bytes of what no folder shows, by device and number, each once: what may be common to several processes.

    Memfds, shared memory that is mapped, unlinked files; pipes and sockets, as full as they can be.
    """
    out: dict[tuple[int, int], int] = {}
    for pid in pids:
        for found in held.descriptors(pid):
            key = found.st_dev, found.st_ino
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                out[key] = found.st_blocks * 512
            elif stat.S_ISSOCK(found.st_mode) or stat.S_ISFIFO(found.st_mode):
                out[key] = SOCKET if stat.S_ISSOCK(found.st_mode) else PIPE
        try:
            lines = held.text(pid, "maps").splitlines()
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
    """Looks at the processes of a sandbox every so often, and says which limit they exceed."""

    def __init__(self, held: Processes, outside: set[int], settings: dict[str, Any]) -> None:
        """outside: members that are not the code's. settings: see `supervisor.Supervisor`.

        With limits and the filter of system calls the kernel bounds the memory of one process, and there is none but
        that of processes, files, pipes and sockets.
        """
        self.held, self._outside, self._limits = held, outside, settings
        self._bounded = {"limits", "seccomp"} <= set(settings["layers"])
        self._folder = None if settings["namespaces"] else settings["folder"]
        self._looks, self._extra, self.next = 0, 0, time.monotonic() + self._tick(1)

    def _tick(self, count: int) -> float:
        """Several processes take memory faster than one may; that there are several is cheaply seen in a namespace."""
        return QUICK if count > 1 else TICK if self._folder is not None else 2 * QUICK

    def members(self) -> list[int]:
        """The code's processes."""
        return [pid for pid in self.held.members() if pid not in self._outside]

    def over(self) -> str | None:
        """The limit that they exceed together, None if none; looks only if it is time."""
        began = time.monotonic()
        if began < self.next:
            return None
        pids, limits = self.members(), self._limits
        found, thorough = None, self._looks % OFTEN == 0
        self._looks += 1
        if thorough and sum(self.held.field(pid, 17) or 0 for pid in pids) > THREADS * limits["processes"]:
            found = "processes"
        elif len(pids) - 1 > limits["processes"]:
            found = "processes"
        elif not (len(pids) <= 1 and self._bounded) and self._memory(pids, thorough) > limits["memory"]:
            found = "memory"
        elif self._folder is not None and thorough and self._disk(pids) > limits["disk"]:
            found = "disk"
        now = time.monotonic()
        self.next = now + max(self._tick(len(pids)), (2 if len(pids) > 1 and self._bounded else 10) * (now - began))
        return found

    def _memory(self, pids: list[int], thorough: bool) -> int:
        if thorough or not self._bounded:
            self._extra = sum(nameless(self.held, pids).values())
        total = resident(self.held, pids)
        return self._extra + (private(self.held, pids) if total + self._extra > self._limits["memory"] else total)

    def _disk(self, pids: list[int]) -> int:
        assert self._folder is not None
        device = os.stat(self._folder).st_dev
        unlinked = sum(size for (place, _), size in nameless(self.held, pids).items() if place == device)
        return unlinked + files(self._folder, self._limits["disk"])

    def stop(self) -> bool:
        """Stop them all; whether they stand still. Those that keep making others do not."""
        for attempt in range(40):
            moving = [pid for pid in self.members() if (self.held.state(pid) or ["X"])[0] not in "TtZX"]
            if not moving:
                return True
            for pid in moving:
                self.held.signal(pid, STOP)
            time.sleep(0.0001 * attempt)
        return False

    def go_on(self) -> None:
        """Let them go on."""
        for pid in self.members():
            self.held.signal(pid, GO_ON)
        self.next = time.monotonic() + self._tick(1)
