"""The layers of the sandbox, which of them this system has, and what they guard.

    namespaces   processes, network, mounts and users of its own, by bubblewrap or else by unshare of util-linux
    landlock     files, TCP, and signals to the outside, by the kernel
    seccomp      system calls that code does not need: sockets, ptrace, kill, mounts, namespaces
    limits       memory, processes, time, files and output

No layer needs root. Each is tried once, with the same call as a run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from jaxrl_llm.errors import InputError, unknown

LAYERS = ("namespaces", "landlock", "seccomp", "limits")
NEEDED = ("files", "network", "processes", "resources")
"""What untrusted code must be kept from."""
CHILD = Path(__file__).with_name("child.py")


@cache
def bubblewrap() -> str | None:
    """The program bwrap, if it is there and can make namespaces here."""
    found = shutil.which("bwrap")
    bind = ["--ro-bind", "/", "/"]
    return found if found and _works([found, "--unshare-all", *bind, "--proc", "/proc", "true"]) else None


@cache
def as_another_user() -> bool:
    """Whether this is root and bubblewrap can give code a user of its own, whose processes the kernel counts.

    Root's are not counted, so that without it a fork bomb is only found by looking.
    """
    wrap = bubblewrap() if os.geteuid() == 0 else None
    return wrap is not None and _works([wrap, *OF_ROOT, "--ro-bind", "/", "/", "--proc", "/proc", "true"])


def counts_processes(layers: Iterable[str]) -> bool:
    """Whether the kernel refuses code of these layers more processes than it may have."""
    held = {"limits", "namespaces"} <= set(layers)
    return held and (as_another_user() if os.geteuid() == 0 else bubblewrap() is not None or unshare() is not None)


@cache
def unshare() -> str | None:
    """The program unshare, if it is there and can make namespaces here."""
    found = shutil.which("unshare")
    return found if found and _works([found, *UNSHARE, "true"]) else None


# All namespaces but that of users, because root within it would be nobody else outside.
OF_ROOT = (
    "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--cap-add",
    "CAP_SETUID", "--cap-add", "CAP_SETGID",
)  # fmt: skip
UNSHARE = (
    "--user", "--map-root-user", "--mount", "--pid", "--net", "--ipc", "--uts", "--fork", "--kill-child",
    "--mount-proc",
)  # fmt: skip


def _works(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, timeout=10, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def _child_works(function: str) -> bool:
    source = f"import sys; sys.path[0] = {str(CHILD.parent)!r}; import child; child.{function}"
    return _works([sys.executable, "-I", "-S", "-c", source])


@cache
def available() -> frozenset[str]:
    """The layers that this system has."""
    found = {"limits"}
    if bubblewrap() or unshare():
        found.add("namespaces")
    if _child_works("confine_files(['/usr', '/lib', '/lib64'], [])"):
        found.add("landlock")
    if _child_works("refuse_calls()"):
        found.add("seccomp")
    return frozenset(found)


def guards(layers: Iterable[str]) -> frozenset[str]:
    """What these layers keep code from: "files" of the host, the "network", other "processes", and "resources"."""
    held, found = set(layers), set()
    for layer in held:
        if layer not in LAYERS:
            raise unknown("layer of the sandbox", layer, LAYERS)
    if "landlock" in held or ("namespaces" in held and bubblewrap()):
        found.add("files")
    if held & {"namespaces", "seccomp"}:
        found |= {"network", "processes"}
    if "limits" in held:
        found.add("resources")
    return frozenset(found)


def require_guards(layers: Iterable[str]) -> None:
    """InputError if the layers leave untrusted code a way out."""
    missing = [name for name in NEEDED if name not in guards(layers)]
    if missing:
        raise InputError(
            f"code of the policy would not be kept from {', '.join(missing)}: install bubblewrap, or use a kernel with "
            "Landlock and seccomp, or allow it with weak=True if the code is trusted or the machine is disposable"
        )
