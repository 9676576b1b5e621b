"""What the processes of a sandbox hold together, seen from outside of it."""

from __future__ import annotations

import os
import stat
import time

KIBIBYTE, PAGE = 1024, os.sysconf("SC_PAGE_SIZE")
SOCKET, PIPE, REGION = 212_992, 65_536, 256  # bytes: what the kernel keeps for each, at most; for a mapping, about
TICK = 0.02  # seconds until the first look, and between two while there is one process
ENTRIES = 10_000  # files in a folder that is looked through
THREADS = 8  # for each process that is allowed
KILL, STOP, GO_ON = 9, 19, 18


class Family:
    """The processes that descend from one. Those of others are looked at once."""

    def __init__(self, root: int) -> None:
        self.root, self._others = root, set[int]()

    def members(self) -> list[int]:
        """Their numbers: the first process, and all that descend from it as far as their parents live."""
        entries = {int(name) for name in os.listdir("/proc") if name.isdigit()}
        parents = {pid: up for pid in entries - self._others if (up := _field(pid, 1)) is not None}
        out = {self.root} & entries
        while new := {pid for pid, up in parents.items() if up in out and pid not in out}:
            out |= new
        self._others = (self._others & entries) | (parents.keys() - out)
        return sorted(out)


def family(pid: int) -> list[int]:
    """A process and all that descend from it, as far as their parents live."""
    return Family(pid).members()


def _field(pid: int, number: int) -> int | None:
    """A number of /proc/PID/stat, counted from the process's state; None if it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as opened:
            return int(opened.read().rpartition(b")")[2].split()[number])
    except (OSError, ValueError, IndexError):
        return None


def _text(pid: int, name: str) -> str:
    with open(f"/proc/{pid}/{name}", errors="surrogateescape") as opened:
        return opened.read()


def threads(pids: list[int]) -> int:
    """How many threads they have together."""
    return sum(_field(pid, 17) or 0 for pid in pids)


def address_space(pids: list[int]) -> int:
    """Bytes of addresses that they have: at least the memory that they hold in them."""
    total = 0
    for pid in pids:
        try:
            total += int(_text(pid, "statm").split()[0]) * PAGE
        except (OSError, ValueError, IndexError):
            continue
    return total


def shared(pids: list[int]) -> dict[tuple[int, int], int]:
    """Bytes of what has no name and may be common to several: by device and number, each once.

    Shared memory and memfds, mapped or open; unlinked files; pipes and sockets, as full as they can be.
    """
    out: dict[tuple[int, int], int] = {}
    mapped: dict[tuple[int, int], int] = {}
    for pid in pids:
        own: dict[tuple[int, int], int] = {}
        try:
            lines = _text(pid, "maps").splitlines()
            names = os.listdir(f"/proc/{pid}/fd")
        except OSError:
            continue
        for line in lines:
            area, rights, offset, device, inode, *path = line.split(maxsplit=5)
            if inode != "0" and (rights[3] == "s" or (path and path[0].endswith("(deleted)"))):
                first, last = (int(end, 16) for end in area.split("-"))
                major, minor = (int(part, 16) for part in device.split(":"))
                key = os.makedev(major, minor), int(inode)
                own[key] = max(own.get(key, 0), int(offset, 16) + last - first)
        for key, size in own.items():
            mapped[key] = max(mapped.get(key, 0), size)
        for name in names:
            try:
                found = os.stat(f"/proc/{pid}/fd/{name}")
            except OSError:
                continue
            key = found.st_dev, found.st_ino
            if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                out[key] = found.st_blocks * 512
            elif stat.S_ISSOCK(found.st_mode) or stat.S_ISFIFO(found.st_mode):
                out[key] = SOCKET if stat.S_ISSOCK(found.st_mode) else PIPE
    return out | {key: max(size, out.get(key, 0)) for key, size in mapped.items()}


def private(pids: list[int]) -> int:
    """Bytes of their own memory, what several have in common counted once, with the kernel's tables of it."""
    total = 0
    for pid in pids:
        try:
            lines = _text(pid, "smaps_rollup").splitlines()[1:]
            sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
            total += (sizes.get("Pss_Anon", sizes["Pss"]) + sizes.get("SwapPss", 0)) * KIBIBYTE
            tables = _text(pid, "status").partition("VmPTE:")[2].split()
            total += int(tables[0]) * KIBIBYTE if tables else 0
        except OSError:
            total += address_space([pid])  # it may not be looked at
        except (ValueError, IndexError, KeyError):
            continue  # it has just ended
    return total


def files(folder: str, pids: list[int], most: int) -> int:
    """Bytes of the files of a folder, and of unlinked ones that these processes hold. More than `most`: too many."""
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
    device = os.stat(folder).st_dev
    return total + sum(size for (place, _), size in shared(pids).items() if place == device)


class Watch:
    """Looks at the processes of a sandbox every so often, and says which limit they exceed."""

    def __init__(self, outside: set[int], limits: dict[str, int], bounded: bool, folder: str | None) -> None:
        """outside: this process and others between it and the code's. bounded: the kernel bounds a process's memory.

        folder: one on the disk, whose files are watched too.
        """
        self.family, self.limits, self.outside = Family(os.getpid()), limits, outside
        self.bounded, self.folder = bounded, folder
        self.next = time.monotonic() + TICK

    def members(self) -> list[int]:
        """The code's processes."""
        return [pid for pid in self.family.members() if pid not in self.outside]

    def over(self) -> str | None:
        """The limit that they exceed together, None if none; looks only if it is time."""
        began = time.monotonic()
        if began < self.next:
            return None
        pids = self.members()
        found, alone = None, len(pids) <= 1
        if len(pids) - 1 > self.limits["processes"] or threads(pids) > THREADS * self.limits["processes"]:
            found = "processes"
        elif not (alone and self.bounded) and self._memory(pids) > self.limits["memory"]:
            found = "memory"
        elif self.folder is not None and files(self.folder, pids, self.limits["disk"]) > self.limits["disk"]:
            found = "disk"
        # Several processes take memory faster than one may, but looking must not take much of the time.
        now = time.monotonic()
        self.next = now + (max(TICK, 10 * (now - began)) if alone else max(TICK / 10, now - began))
        return found

    def _memory(self, pids: list[int]) -> int:
        held = address_space(pids)
        if held > self.limits["memory"] or not self.bounded:
            held = private(pids) + sum(shared(pids).values())
        return held

    def stop(self) -> bool:
        """Stop them all; whether they stand still. Those that keep making others do not."""
        for attempt in range(40):
            moving = [pid for pid in self.members() if not _stands(pid)]
            if not moving:
                return True
            for pid in moving:
                signalled(pid, STOP)
            time.sleep(0.0002 * (attempt + 1))
        return False

    def go_on(self) -> None:
        """Let them go on."""
        for pid in self.members():
            signalled(pid, GO_ON)
        self.next = time.monotonic() + TICK


def _stands(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat", "rb") as opened:
            return opened.read().rpartition(b")")[2].split()[0] in (b"T", b"t", b"Z", b"X")
    except (OSError, IndexError):
        return True


def signalled(pid: int, number: int) -> None:
    """Send a signal to a process that may be gone."""
    try:
        os.kill(pid, number)
    except OSError:
        pass
