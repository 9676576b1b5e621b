"""A Python interpreter as a tool: the policy's code runs in the sandbox, in a session of its episode."""

from __future__ import annotations

import re
import threading
import weakref
from collections.abc import Callable, Iterable
from typing import Annotated, Any

from jaxrl_llm.core.arguments.checks import checked
from jaxrl_llm.core.arguments.ranges import Range
from jaxrl_llm.environments.copies import NotCopiedError
from jaxrl_llm.environments.sandbox import Limits, Result, Session, available, require_guards
from jaxrl_llm.environments.tools.base import EachEpisode, shortened
from jaxrl_llm.utils.errors import require

CHARACTERS = 4000
LIMITS = Limits(seconds=5.0, memory=512, processes=16, output=2**18)

_KEPT = "Names, imports and files are kept until the end of the conversation. "
_NOT_KEPT = "Every call begins anew: no names and files are kept. "
_TOLD = """Run Python code and return what it prints, with the value of a last line that is an expression.

{state}There is no network, and no package beside the standard library. Code is stopped after {seconds:g} seconds, or
with more than {memory} MiB of memory. Of what it prints, {characters:,} characters are shown.

Args:
    code: Python code.
"""
_ADDRESS = re.compile(r" at 0x[0-9a-f]{8,16}>")


@checked
def python_tools(
    state: bool = True,
    limits: Limits = LIMITS,
    characters: Annotated[int, Range(least=100)] = CHARACTERS,
    layers: Iterable[str] | None = None,
    weak: bool = False,
) -> EachEpisode:
    """A tool `python(code)`.

    state: names and files are kept over the calls of an episode; a session that is stopped at a limit begins anew.
    limits: of a call, which the tool's description tells the policy. characters: of a result; of a longer one its
    beginning and end are shown. layers, weak: see `sandbox.run_code`.

    The same code prints the same, but for clocks, random numbers without a seed, and races.

    Raises InputError for a number that is no size and, when an episode or `with_tools` makes it, where the layers leave
    the policy's code a way out, unless weak.
    """
    require("seconds", limits.seconds, above=0)
    return EachEpisode(lambda: _Interpreter(state, limits, characters, layers, weak))


class _Interpreter:
    def __init__(
        self, state: bool, limits: Limits, characters: int, layers: Iterable[str] | None, weak: bool
    ) -> None:  # fmt: skip
        chosen = available() if layers is None else frozenset(layers)
        if not weak:
            require_guards(chosen)
        self._anew = None if state else (lambda: _Interpreter(False, limits, characters, chosen, weak))
        held = _Held(lambda: Session(limits, chosen, weak))
        self._end = weakref.finalize(self, held.close)  # also if the episode is abandoned

        def python(code: str) -> str:
            return as_told(held.run(code, state), limits, characters, state)

        python.__doc__ = _TOLD.format(
            state=_KEPT if state else _NOT_KEPT, seconds=limits.seconds, memory=limits.memory, characters=characters
        )
        self.functions: tuple[Callable[..., Any], ...] = (python,)

    def copy(self) -> _Interpreter:
        """Another that keeps nothing either. NotCopiedError for a session, whose code can only be run again."""
        if self._anew is None:
            raise NotCopiedError("its session of Python is another process")
        return self._anew()

    def close(self) -> None:
        self._end()


class _Held:
    """A session, for one call at a time: one that the toolbox gave up may still be running."""

    def __init__(self, make: Callable[[], Session]) -> None:
        self._make, self._lock, self._closed = make, threading.Lock(), False
        self._session: Session | None = None

    def run(self, code: str, keep: bool) -> Result:
        """Run code, and keep the session or not."""
        with self._lock:
            if self._closed:
                raise RuntimeError("the conversation is over")
            if self._session is None:
                self._session = self._make()
            try:
                return self._session.run(code)
            finally:
                if not keep:
                    self._drop()

    def _drop(self) -> None:
        if self._session is not None:
            self._session.close()
            self._session = None

    def close(self) -> None:
        """End the session, after the call that is running."""
        with self._lock:
            self._closed = True
            self._drop()


def as_told(found: Result, limits: Limits, characters: int, state: bool = True) -> str:
    """What code did, as the policy sees it. Addresses of objects, which differ from run to run, are left out."""
    text = shortened(_ADDRESS.sub(" at 0x...>", found.stdout).rstrip("\n"), characters)
    anew = " The session begins anew: its names and files are lost." if state else ""
    if found.stopped == "seconds":
        end = f"[stopped: it ran for more than {limits.seconds:g} seconds.{anew}]"
    elif found.stopped is not None:
        sizes = {"memory": f"{limits.memory} MiB of memory", "disk": f"{limits.disk} MiB of files"}
        most = sizes.get(found.stopped, f"{limits.processes} processes")
        end = f"[stopped: it used more than {most}.{anew}]"
    elif found.status != 0:
        how = f"exit code {found.status}" if (found.status or 0) > 0 else f"signal {-(found.status or 0)}"
        end = f"[the interpreter ended with {how}.{anew}]"
    else:
        end = "" if text else "[it printed nothing]"
    return "\n".join(part for part in (text, end) if part)


python = python_tools()
