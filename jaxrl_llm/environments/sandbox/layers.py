"""The layers of the sandbox, which of them this system has, and what they keep untrusted code from.

    namespaces   processes, network, users and a root of its own, without any file of the host but those to read
    landlock     no files but its own, no TCP, no signals to the outside, by the kernel
    seccomp      a list of the system calls that it may make: no sockets, traces, mounts, or memory that is no process's
    limits       memory, processes, time, files and output

No layer needs root. Each is tried once, by a run.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

from jaxrl_llm.environments.sandbox.supervisor import Settings, Supervisor, memory_groups
from jaxrl_llm.utils.errors import InputError, unknown

LAYERS = ("namespaces", "landlock", "seccomp", "limits")
GUARDS = {
    "files": "files outside of its folder are not read, made, changed or deleted, nor their modes, owners and times, "
    "beside `readable`, which it may read",
    "metadata": "files outside are not seen either: not their names, sizes and times",
    "network": "no socket of another program, of any kind, is reached",
    "processes": "processes of others are not signalled, traced, limited or scheduled",
    "memory": "its processes together hold no more than a tenth above the limit, beside files up to their own limit",
    "resources": "it has no more time, processes, output and files than its limits",
    "end": "nothing of it runs on after its end, a session's, or that of the program that started it",
}
"""What layers may keep, and what that means."""
NEEDED = ("files", "network", "processes", "memory", "resources", "end")
"""What untrusted code must be kept from."""


@cache
def available() -> frozenset[str]:
    """The layers that this system has."""
    return frozenset(layer for layer in LAYERS if _works(layer))


def _works(layer: str) -> bool:
    held = Supervisor(Settings(layers=frozenset({layer})))
    try:
        return held.ask(None, 30.0).status == 0
    except (OSError, ValueError):
        return False
    finally:
        held.close()


def guards(layers: Iterable[str]) -> frozenset[str]:
    """What these layers keep code from, together; the words are those of `GUARDS`."""
    held = set(layers)
    for layer in held:
        if layer not in LAYERS:
            raise unknown("layer of the sandbox", layer, LAYERS)
    apart, filtered, limited = "namespaces" in held, "seccomp" in held, "limits" in held
    kept = {
        "files": apart or (filtered and "landlock" in held),
        "metadata": apart,
        "network": filtered,  # namespaces do not keep sockets of virtual machines apart
        "processes": apart or filtered,
        "end": apart or filtered,
        "resources": limited and (apart or filtered),
        "memory": limited and (filtered or (apart and memory_groups() is not None)),
    }
    return frozenset(name for name, whether in kept.items() if whether)


def require_guards(layers: Iterable[str]) -> None:
    """InputError if the layers leave untrusted code a way out."""
    held = guards(layers)
    missing = [name for name in NEEDED if name not in held]
    if missing:
        raise InputError(
            f"code of the policy would not be kept from {', '.join(missing)}: use a system with seccomp and either "
            "user namespaces or Landlock (Linux 6.2), or weak=True if the code is trusted or the machine is disposable"
        )
