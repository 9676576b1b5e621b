"""Run code in the sandbox, once, and return what it wrote."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from jaxrl_llm.environments.sandbox.inside.watch import family
from jaxrl_llm.environments.sandbox.layers import available, require_guards
from jaxrl_llm.environments.sandbox.supervisor import (
    GRACE,
    Limits,
    Result,
    Settings,
    Supervisor,
    checked_files,
    readable_paths,
)

__all__ = ["Limits", "Result", "family", "run_code", "settings_of"]
USUAL = Limits()


def settings_of(
    limits: Limits, layers: Iterable[str] | None, weak: bool, readable: Iterable[str], **more: object
) -> Settings:
    """Settings of a sandbox, checked. InputError where the layers leave code a way out, unless weak."""
    chosen = available() if layers is None else frozenset(layers)
    if not weak:
        require_guards(chosen)
    return Settings(chosen, limits, readable_paths(readable), **more)  # type: ignore[arg-type]


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
    settings = settings_of(
        limits, layers, weak, readable, code=code, files=checked_files(files or {}, limits),
        stdin=stdin.encode("utf-8", "surrogateescape"),
    )  # fmt: skip
    held = Supervisor(settings)
    try:
        return held.ask(None, GRACE)
    finally:
        held.close()
