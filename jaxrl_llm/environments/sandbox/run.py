"""Run code in the sandbox: once, or as a session of blocks that share their variables.

The layers of the sandbox, of which none needs root, and each is tried once, by a run:

    namespaces   processes, network, users and a root of its own, without any file of the host but those to read
    landlock     no files but its own, no TCP, no signals to the outside, by the kernel
    seccomp      a list of the system calls that it may make: no sockets, traces, mounts, or memory that is no process's
    limits       memory, processes, time, files and output
"""

from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import replace
from functools import cache

from jaxrl_llm.environments.sandbox.inside.watch import family
from jaxrl_llm.environments.sandbox.supervisor import (
    GRACE,
    Limits,
    Result,
    SandboxSettings,
    Supervisor,
    checked_files,
    memory_groups,
    readable_paths,
)
from jaxrl_llm.utils.errors import InputError, require_choice

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
    with closing(Supervisor(SandboxSettings(layers=frozenset({layer})))) as held, suppress(OSError, ValueError):
        return held.ask(None, 30.0).status == 0
    return False


def guards(layers: Iterable[str]) -> frozenset[str]:
    """What these layers keep code from, together; the words are those of `GUARDS`."""
    held = set(layers)
    for layer in held:
        require_choice("layer of the sandbox", layer, LAYERS)
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
    if missing := [name for name in NEEDED if name not in held]:
        raise InputError(
            f"code of the policy would not be kept from {', '.join(missing)}: use a system with seccomp and either "
            "user namespaces or Landlock (Linux 6.2), or weak=True if the code is trusted or the machine is disposable"
        )


__all__ = ["Limits", "Result", "_settings_of", "family", "run_code"]
USUAL = Limits()


def _settings_of(
    limits: Limits, layers: Iterable[str] | None, weak: bool, readable: Iterable[str], **more: object
) -> SandboxSettings:
    """Settings of a sandbox, checked. InputError where the layers leave code a way out, unless weak."""
    chosen = available() if layers is None else frozenset(layers)
    if not weak:
        require_guards(chosen)
    return SandboxSettings(chosen, limits, readable_paths(readable), **more)  # type: ignore[arg-type]


def run_code(
    code: str,
    stdin: str = "",
    files: Mapping[str, str] | None = None,
    limits: Limits = USUAL,
    layers: Iterable[str] | None = None,
    weak: bool = False,
    readable: Iterable[str] = (),
) -> Result:
    """Run Python code in a process of its own, in an empty folder.

    files: texts in that folder, by name. layers: by default all that the system has. weak: run it although too few of
    them hold. readable: folders beside Python's own that the code may read, such as those of packages.

    Raises InputError where the layers leave untrusted code a way out, unless weak, and for files and folders that would
    be one; OSError where the sandbox cannot be started.
    """
    settings = _settings_of(
        limits, layers, weak, readable, code=code, files=checked_files(files or {}, limits),
        stdin=stdin.encode("utf-8", "surrogateescape"),
    )  # fmt: skip
    with closing(Supervisor(settings)) as held:
        return held.ask(None, GRACE)


class Session:
    """An interpreter that is started with its first block. One that exceeds a limit is killed; the next starts anew."""

    def __init__(
        self, limits: Limits = USUAL, layers: Iterable[str] | None = None, weak: bool = False,
        readable: Iterable[str] = (),
    ) -> None:  # fmt: skip
        """As for `run_code`; the limit of seconds is that of a block. Between blocks all its processes stand still."""
        self._settings = _settings_of(limits, layers, weak, readable, session=True)
        self._held: Supervisor | None = None

    def run(self, code: str) -> Result:
        """Run a block. Errors with their traceback, and the value of a last line that is an expression, are in stdout.

        What the block writes to stderr is there too, in its order. OSError where the sandbox cannot be started.
        """
        started = self._held is None
        if self._held is None:
            self._held = Supervisor(replace(self._settings, code=code))
        try:
            found = self._held.ask(None if started else code, GRACE)
        except OSError:
            self.close()
            raise
        if self._held.ended:
            self.close()
        return found

    def close(self) -> None:
        """End the interpreter, and all that it has started."""
        if self._held is not None:
            self._held.close()
            self._held = None
