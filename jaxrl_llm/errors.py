"""Errors that a user can act on: one line that says what is wrong and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """Bad input. The message is one line: what was found, and what to do about it.

    The command line prints it without a traceback (unless `--traceback`) and exits with status 2.
    """


def unknown(kind: str, name: str, known: Iterable[str]) -> InputError:
    """The error for a name that is not in a list, with the nearest names as suggestions.

    >>> str(unknown("algorithm", "gropo", ["grpo", "rloo"]))
    "unknown algorithm 'gropo': did you mean 'grpo'? Known: grpo, rloo"
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    hint = f": did you mean {near[0]!r}?" if near else "."
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    return InputError(f"unknown {kind} {name!r}{hint} Known: {shown or 'none'}")


def need(package: str, extra: str, why: str) -> InputError:
    """The error for an optional package that is not installed."""
    return InputError(f"{why} needs the package {package!r}: pip install 'jaxrl_llm[{extra}]'")
