"""Layers that a process puts around itself: a root of its own, Landlock, the filter of system calls, and limits."""

from __future__ import annotations

import _ctypes
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
KEYCTL = {"x86_64": 250, "aarch64": 219}
MOUNT_SETATTR, PIVOT_ROOT = 442, {"x86_64": 155, "aarch64": 41}
PARENT_DEATH, DUMPABLE, SECCOMP, SUBREAPER, NO_NEW_PRIVILEGES, NO_HUGE_PAGES = 1, 4, 22, 36, 38, 41
DEVICES = [path for path in ("/dev/null", "/dev/random", "/dev/urandom") if os.path.exists(path)]
FOLDER, BOX = "/box/code", "/box"  # where the code runs, in a root of its own
WITHIN = 1000  # the user that code of a namespace of users takes itself for

READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read files, read folders
WRITE = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 9 | 1 << 10 | 1 << 12 | 1 << 13 | 1 << 14
OF_FILES = 1 << 0 | 1 << 1 | 1 << 2 | 1 << 14
TRUNCATE = 3  # the version from which Landlock keeps files from being cut, too


# All of ctypes takes half as long to import as Python takes to start; what it is made of suffices here.
class _Int(_ctypes._SimpleCData):
    _type_ = "i"


class _Function(_ctypes.CFuncPtr):
    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
    _restype_ = _Int


class _Char(_ctypes._SimpleCData):
    _type_ = "c"


def c(function: str, *arguments: int | bytes | None) -> int:
    """A function of the C library, of numbers below 2^31, bytes and null pointers. OSError if it gives less than 0."""
    library = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]
    found = int(_Function(_ctypes.dlsym(library, function))(*arguments))
    if found < 0:
        number = _ctypes.get_errno()
        raise OSError(number, f"{function}{arguments[:1]}: {os.strerror(number)}")
    return found


def call(number: int, *arguments: int | bytes | None) -> int:
    """A system call. OSError if it fails."""
    return c("syscall", number, *arguments)


def control(option: int, value: int, pointer: int | bytes = 0) -> None:
    """`prctl`. OSError if it fails."""
    c("prctl", option, value, pointer, 0, 0)


def end_with_parent(alive: int) -> None:
    """Be killed when the process that started this one ends; at once, if it has. alive: a pipe that it reads."""
    import select

    control(PARENT_DEATH, 9)
    waiting = select.poll()
    waiting.register(alive, 0)
    if waiting.poll(0):
        os._exit(0)


def own_users() -> None:
    """In a new namespace of users: be the only user there, so that mounts are allowed."""
    user, group = os.geteuid(), os.getegid()
    c("unshare", NEW_USER | NEW_PIDS)
    for name, text in (("setgroups", "deny"), ("uid_map", f"{WITHIN} {user} 1"), ("gid_map", f"{WITHIN} {group} 1")):
        with open(f"/proc/self/{name}", "w") as opened:
            opened.write(text)


def mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    """`mount`. OSError if it fails."""
    text = [None if one is None else os.fsencode(one) for one in (target, source, kind, options)]
    c("mount", text[1], text[0], text[2], flags, text[3])


def attributes(path: str, flags: int, tree: int) -> None:
    """Set flags of a mount, and of all mounts below it if `tree` is WHOLE_TREE. OSError before Linux 5.12."""
    wanted = struct.pack("=QQQQ", flags, 0, 0, 0)
    call(MOUNT_SETATTR, HERE, os.fsencode(path), tree, wanted, len(wanted))


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
    c("umount2", b"/old", DETACH)
    os.rmdir("/old")
    attributes("/", READ_ONLY | NOSUID | NODEV, 0)


def become(user: int | None) -> None:
    """Be a user that no system has, or stay the one that it is, without any capability."""
    control(NO_NEW_PRIVILEGES, 1)
    if user is not None:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    control(DUMPABLE, 1)  # whoever started it may look at it
    c("capset", struct.pack("=Ii", 0x20080522, 0), bytes(24))


def own_keys() -> None:
    """Have a keyring without the keys of who started this, where the kernel has keys."""
    try:
        call(KEYCTL[os.uname().machine], 1, None)
    except OSError:
        return


def confine_files(readable: list[str], writable: list[str]) -> None:
    """Landlock: no files but these, no TCP, no signals and abstract sockets to the outside. OSError without it."""
    try:
        version = call(444, None, 0, 1)
    except OSError:
        version = 0
    if version < TRUNCATE:
        raise OSError(38, "the kernel has no Landlock of version 3, which came with Linux 6.2")
    handled = READ | WRITE | 1 << 6 | 1 << 11 | (1 << 15 if version >= 5 else 0)
    wanted = struct.pack("=QQQ", handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = call(444, wanted[:size], size, 0)
    for paths, allowed in ((readable, READ), (writable, READ | WRITE), (DEVICES, 1 << 1 | 1 << 2)):
        for path in paths:
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            call(445, rules, 1, struct.pack("=Qi", allowed if os.path.isdir(path) else allowed & OF_FILES, opened), 0)
            os.close(opened)
    call(446, rules, 0)
    os.close(rules)


def filter_calls(program: bytes, own: int) -> None:
    """seccomp: calls that the program does not allow fail, here and in all children. OSError without it.

    own: the number that stands in it for this process.
    """
    program = program.replace(struct.pack("=I", own), struct.pack("=I", os.getpid()))
    size = len(program)
    kind: Any = type("_Text", (_ctypes.Array,), {"_type_": _Char, "_length_": size})
    held = kind.from_buffer(bytearray(program))
    control(SECCOMP, 2, struct.pack("@HxxxxxxP", size // 8, _ctypes.addressof(held)))


def limit(limits: dict[str, int]) -> None:
    """Limits of this process and its children: bytes of memory, seconds, files, processes, core dumps."""
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    control(NO_HUGE_PAGES, 1)  # memory is taken page by page, no faster than it is watched
