"""Layers that a process puts around itself: a root of its own, Landlock, the filter of system calls, and limits."""

from __future__ import annotations

import ctypes
import os
import resource
import struct

TYPE_CHECKING = False  # as in typing
if TYPE_CHECKING:
    from typing import Any

NEW_MOUNTS, NEW_CGROUP, NEW_NAMES, NEW_IPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEW_USER, NEW_PIDS, NEW_NETWORK = 0x10000000, 0x20000000, 0x40000000
NOSUID, NODEV, READ_ONLY = 2, 4, 1
BIND, RECURSIVE, PRIVATE = 1 << 12, 1 << 14, 1 << 18
DETACH, WHOLE_TREE, HERE = 2, 0x8000, -100
MOUNT_SETATTR, PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
NO_NEW_PRIVILEGES, PARENT_DEATH, DUMPABLE, SECCOMP, NO_HUGE_PAGES = 38, 1, 4, 22, 41
DEVICES = [path for path in ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom") if os.path.exists(path)]
FOLDER, BOX = "/box/code", "/box"  # where the code runs, in a root of its own
WITHIN = 1000  # the user that code of a namespace of users takes itself for

READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read files, read folders
WRITE = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 9 | 1 << 10 | 1 << 12 | 1 << 13 | 1 << 14
OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14
TRUNCATE = 3  # the version from which Landlock keeps files from being cut, too

library = ctypes.CDLL(None, use_errno=True)


def checked(found: int, what: str) -> int:
    """The result of a function of C. OSError, which says what was tried, if it is below 0."""
    if found < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return found


def call(number: int, *arguments: Any) -> int:
    """A system call. OSError if it fails."""
    return checked(int(library.syscall(ctypes.c_long(number), *arguments)), f"system call {number}")


def control(option: int, *arguments: Any) -> None:
    """`prctl`. OSError if it fails."""
    padded = [*arguments, *[ctypes.c_ulong(0)] * (4 - len(arguments))]
    checked(library.prctl(ctypes.c_int(option), *padded), f"prctl {option}")


def end_with_parent(alive: int) -> None:
    """Be killed when the process that started this one ends; at once, if it has. alive: a pipe that it reads."""
    import select

    control(PARENT_DEATH, ctypes.c_ulong(9))
    waiting = select.poll()
    waiting.register(alive, 0)
    if waiting.poll(0):
        os._exit(0)


def separate(flags: int) -> None:
    """Have namespaces of one's own. OSError where the system gives none."""
    checked(library.unshare(ctypes.c_int(flags)), "unshare")


def own_users() -> None:
    """In a new namespace of users: be the only user there, so that mounts are allowed."""
    user, group = os.geteuid(), os.getegid()
    separate(NEW_USER | NEW_PIDS)
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{WITHIN} {user} 1"),
        ("gid_map", f"{WITHIN} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as opened:
            opened.write(text)


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """`mount`. OSError if it fails."""
    text = [None if one is None else os.fsencode(one) for one in (source, target, kind, options)]
    checked(library.mount(*text[:3], ctypes.c_ulong(flags), text[3]), f"mount {target}")


def attributes(path: str, flags: int, tree: int) -> None:
    """Set flags of a mount, and of all mounts below it if `tree` is WHOLE_TREE. OSError before Linux 5.12."""
    wanted = struct.pack("=QQQQ", flags, 0, 0, 0)
    call(MOUNT_SETATTR, ctypes.c_int(HERE), os.fsencode(path), ctypes.c_uint(tree), wanted, ctypes.c_size_t(32))


def own_root(readable: list[str], size: int, user: int | None) -> None:
    """A root with the readable paths, a few devices, and a folder in memory of at most `size` bytes, nothing else.

    Nothing can be written but the folder, the user's if there is one. Nothing of it is left when the processes end.
    """
    mount("none", "/", None, RECURSIVE | PRIVATE)
    real = {path: os.path.realpath(path) for path in [*readable, *DEVICES]}  # links may lead anywhere
    base = next(path for path in readable if os.path.isdir(path))  # covered for a moment
    mount("tmpfs", base, "tmpfs", NOSUID | NODEV, "size=1m,mode=0755")
    os.mkdir(f"{base}/old")
    os.chdir(base)
    call(PIVOT_ROOT[os.uname().machine], b".", b"old")
    os.chdir("/")
    for path, source in real.items():
        old = "/old" + source
        if os.path.isdir(old):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
        mount(old, path, None, BIND | RECURSIVE)
        if path not in DEVICES:
            attributes(path, READ_ONLY | NOSUID | NODEV, WHOLE_TREE)
    os.mkdir(BOX)
    mount("tmpfs", BOX, "tmpfs", NOSUID | NODEV, f"size={size},nr_inodes=16384,mode=0755")
    for name, links in (("code", ()), ("tmp", ("/tmp", "/var/tmp")), ("shm", ("/dev/shm",))):
        os.mkdir(f"{BOX}/{name}", 0o700)
        if user is not None:
            os.chown(f"{BOX}/{name}", user, user)
        for link in links:
            if not os.path.lexists(link):
                os.makedirs(os.path.dirname(link), exist_ok=True)
                os.symlink(f"{BOX}/{name}", link)
    checked(library.umount2(b"/old", ctypes.c_int(DETACH)), "umount")
    os.rmdir("/old")
    attributes("/", READ_ONLY | NOSUID | NODEV, 0)


def become(user: int | None) -> None:
    """Be a user that no system has, or stay the one that it is, without any capability."""
    control(NO_NEW_PRIVILEGES, ctypes.c_ulong(1))
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
        control(DUMPABLE, ctypes.c_ulong(1))
    header, none = struct.pack("=Ii", 0x20080522, 0), bytes(24)
    checked(library.capset(header, none), "capset")


def landlock_version() -> int:
    """Of the kernel's Landlock; 0 without it."""
    try:
        return call(444, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    except OSError:
        return 0


def confine_files(readable: list[str], writable: list[str]) -> None:
    """Landlock: no files but these, no TCP, no signals and abstract sockets to the outside. OSError without it."""
    version = landlock_version()
    if version < TRUNCATE:
        raise OSError(38, "the kernel has no Landlock of version 3, which came with Linux 6.2")
    handled = READ | WRITE | 1 << 6 | 1 << 11 | (1 << 15 if version >= 5 else 0)
    wanted = struct.pack("=QQQ", handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = call(444, wanted[:size], ctypes.c_size_t(size), ctypes.c_uint(0))
    for paths, allowed in ((readable, READ), (writable, READ | WRITE), (DEVICES, 1 << 1 | 1 << 2)):
        for path in paths:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            rights = allowed if os.path.isdir(path) else allowed & OF_FILES
            call(445, ctypes.c_int(rules), ctypes.c_int(1), struct.pack("=Qi", rights, opened), ctypes.c_uint(0))
            os.close(opened)
    call(446, ctypes.c_int(rules), ctypes.c_uint(0))
    os.close(rules)


def filter_calls(program: bytes, own: int) -> None:
    """seccomp: calls that the program does not allow fail, here and in all children. OSError without it.

    own: the number that stands in it for this process.
    """
    program = program.replace(struct.pack("=I", own), struct.pack("=I", os.getpid()))
    held = ctypes.create_string_buffer(program, len(program))
    bpf = struct.pack("@HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    control(SECCOMP, ctypes.c_ulong(2), bpf)


def limit(limits: dict[str, int]) -> None:
    """Limits of this process and its children: bytes of memory, seconds, files, processes, core dumps."""
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    control(NO_HUGE_PAGES, ctypes.c_ulong(1))  # memory is taken page by page, no faster than it is watched
