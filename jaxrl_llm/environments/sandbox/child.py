"""What runs inside of the sandbox: it gives up what the code must not have, then runs the code.

The file is a program of its own, started as `python -P -s -S child.py SETTINGS`, and needs the standard library alone.
SETTINGS, a literal of Python, say which layers to apply here, their limits, and what to run. Few modules are imported,
because each takes milliseconds of every start.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys

TYPE_CHECKING = False  # as in typing
if TYPE_CHECKING:
    from typing import Any

# Numbers of system calls: (x86-64, AArch64); None where an architecture has no such call.
REFUSED: dict[str, tuple[int | None, int]] = {
    "ptrace": (101, 117), "socket": (41, 198), "kill": (62, 129), "tkill": (200, 130), "unshare": (272, 97),
    "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "bpf": (321, 280), "perf_event_open": (298, 241), "keyctl": (250, 219), "add_key": (248, 217),
    "request_key": (249, 218), "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "userfaultfd": (323, 282), "io_uring_setup": (425, 425), "open_by_handle_at": (304, 265),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "pidfd_send_signal": (424, 424),
    "pidfd_getfd": (438, 438), "quotactl": (179, 60), "acct": (163, 89), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "sethostname": (170, 161), "setdomainname": (171, 162), "iopl": (172, 999_999),
    "ioperm": (173, 999_999), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsmount": (432, 432), "mount_setattr": (442, 442), "mknod": (133, 999_999), "mknodat": (259, 33),
}  # fmt: skip
CLONE3, CLONE = (435, 435), (56, 220)
NEW_NAMESPACES = 0x7E020080  # flags of clone that make namespaces
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
EPERM, ENOSYS = 1, 38

READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read files, read folders
WRITE = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 7 | 1 << 8 | 1 << 9 | 1 << 10 | 1 << 12


def call(number: int, *arguments: Any) -> int:
    """A system call. OSError if it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    found = int(library.syscall(ctypes.c_long(number), *arguments))
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found


def control(option: int, *arguments: Any) -> None:
    """`prctl`. OSError if it fails."""
    library = ctypes.CDLL(None, use_errno=True)
    padded = [*arguments, *[ctypes.c_ulong(0)] * (4 - len(arguments))]
    if library.prctl(ctypes.c_int(option), *padded) != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def no_new_privileges() -> None:
    """Programs with the set-user-id bit give none either."""
    control(38, ctypes.c_ulong(1))


def landlock_version() -> int:
    """Of the kernel's Landlock; 0 without it."""
    try:
        return call(444, None, ctypes.c_size_t(0), ctypes.c_uint(1))
    except OSError:
        return 0


def confine_files(readable: list[str], writable: list[str]) -> None:
    """Landlock: no files but these, no TCP, no signals and abstract sockets to the outside. OSError without it."""
    version = landlock_version()
    if version < 1:
        raise OSError(ENOSYS, "the kernel has no Landlock")
    write = WRITE | (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    handled = READ | write | 1 << 6 | 1 << 11 | (1 << 15 if version >= 5 else 0)
    attributes = struct.pack("=QQQ", handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0)
    size = 24 if version >= 6 else 16 if version >= 4 else 8
    rules = call(444, ctypes.c_char_p(attributes[:size]), ctypes.c_size_t(size), ctypes.c_uint(0))
    for paths, allowed in ((readable, READ), (writable, READ | write), (["/dev/null"], 1 << 1 | 1 << 2)):
        for path in paths:
            if not os.path.exists(path):
                continue
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            # Rules on files take the rights of files alone.
            of_files = 1 << 0 | 1 << 1 | 1 << 2 | (1 << 14 if version >= 3 else 0)
            rights = allowed if os.path.isdir(path) else allowed & of_files
            rule = struct.pack("=Qi", rights, opened)
            call(445, ctypes.c_int(rules), ctypes.c_int(1), ctypes.c_char_p(rule), ctypes.c_uint(0))
            os.close(opened)
    no_new_privileges()
    call(446, ctypes.c_int(rules), ctypes.c_uint(0))
    os.close(rules)


def filter_program(machine: str) -> bytes:
    """The BPF program that refuses the calls of REFUSED, clone3 and clones with new namespaces."""
    column, audit = ARCHITECTURES[machine]
    refused = sorted({numbers[column] or -1 for numbers in REFUSED.values()} - {-1, 999_999})
    load, equal, above, masked, end = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, kill = 0x7FFF0000, 0x80000000
    no, missing = 0x00050000 | EPERM, 0x00050000 | ENOSYS
    # (code, jump if true, jump if false, value); jumps are counted in instructions and filled in below.
    out = [(load, 0, 0, 4), (equal, 1, 0, audit), (end, 0, 0, kill), (load, 0, 0, 0)]
    if machine == "x86_64":  # the same calls by their x32 numbers
        out += [(above, 0, 1, 0x40000000), (end, 0, 0, missing)]
    out += [(equal, 0, 1, CLONE3[column]), (end, 0, 0, missing)]  # the C library then uses clone
    for number in refused:
        out += [(equal, 0, 1, number), (end, 0, 0, no)]
    out += [(equal, 0, 3, CLONE[column]), (load, 0, 0, 16), (masked, 0, 1, NEW_NAMESPACES), (end, 0, 0, no)]
    out += [(end, 0, 0, allow)]
    return b"".join(struct.pack("=HBBI", *one) for one in out)


def refuse_calls() -> None:
    """seccomp: the calls above fail, here and in all children. OSError without it."""
    machine = os.uname().machine
    if machine not in ARCHITECTURES:
        raise OSError(ENOSYS, f"no filter is known for {machine}")
    program = filter_program(machine)
    held = ctypes.create_string_buffer(program, len(program))
    bpf = struct.pack("@HxxxxxxP", len(program) // 8, ctypes.addressof(held))
    no_new_privileges()
    control(22, ctypes.c_ulong(2), ctypes.c_char_p(bpf))


def limit(limits: dict[str, int]) -> None:
    """Limits of this process and its children: bytes of memory, seconds, files, processes, core dumps."""
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))


def own_folder(folder: str, size: int) -> None:
    """A folder in memory of at most `size` bytes, in a mount namespace that only this process has."""
    library = ctypes.CDLL(None, use_errno=True)
    for arguments in (
        (b"none", b"/", None, 1 << 18 | 1 << 14, None),  # private, recursively
        (b"tmpfs", folder.encode(), b"tmpfs", 2 | 4, f"size={size},mode=0700".encode()),  # no devices, no set-user-id
    ):
        if library.mount(*arguments[:3], ctypes.c_ulong(arguments[3]), arguments[4]) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def literal(text: str) -> Any:
    """The value of a literal, which the outside has written."""
    return eval(text, {"__builtins__": {}})


def main() -> None:
    """Apply the layers, then run the code: a file once, or blocks that come one after another."""
    settings = literal(sys.argv[1])
    os.closerange(3, 4096)
    files = settings["files"]
    if settings["own_folder"]:
        own_folder(settings["folder"], settings["disk"])
    os.chdir(settings["folder"])
    for name, text in files.items():
        os.makedirs(os.path.dirname(os.path.join(".", name)), exist_ok=True)
        with open(name, "w") as opened:
            opened.write(text)
    if "limits" in settings["layers"]:
        limit(settings["limits"])
    if settings["user"] is not None:
        os.setgroups([])
        os.setgid(settings["user"])
        os.setuid(settings["user"])
    if "landlock" in settings["layers"]:
        confine_files(settings["readable"], [settings["folder"]])
    if "seccomp" in settings["layers"]:
        refuse_calls()
    sys.path[0:1] = ["."]
    if settings["session"]:
        serve()
    else:
        code, name = settings["code"], "main.py"
        del sys.argv[1:]
        exec(compile(code, name, "exec"), {"__name__": "__main__", "__file__": name})


def serve() -> None:
    """Run blocks of code in one namespace. Each comes as a line, {"code", "end"}, and is answered by `end`.

    As in a notebook, the value of a last line that is an expression is shown.
    """
    import ast
    import traceback

    spoken = os.fdopen(os.dup(0), "r", encoding="utf-8", closefd=True)
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    os.dup2(1, 2)  # one stream, in order
    sys.stderr = sys.stdout
    names: dict[str, Any] = {"__name__": "__main__"}
    for line in spoken:
        asked = literal(line)
        try:
            tree: Any = compile(asked["code"], "<code>", "exec", ast.PyCF_ONLY_AST)
            last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
            exec(compile(tree, "<code>", "exec"), names)
            if isinstance(last, ast.Expr):
                sys.displayhook(eval(compile(ast.Expression(last.value), "<code>", "eval"), names))
        except SystemExit:
            pass
        except BaseException:
            kind, error, trace = sys.exc_info()
            traceback.print_exception(kind, error, trace.tb_next if trace is not None else None, file=sys.stdout)
        print(asked["end"], flush=True)


if __name__ == "__main__":
    main()
