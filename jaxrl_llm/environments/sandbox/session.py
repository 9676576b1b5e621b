"""A session: blocks of code that share their variables, in one sandboxed interpreter."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from jaxrl_llm.environments.sandbox.run import USUAL, settings_of
from jaxrl_llm.environments.sandbox.supervisor import GRACE, Limits, Result, Supervisor


class Session:
    """An interpreter that is started with its first block. One that exceeds a limit is killed; the next starts anew."""

    def __init__(
        self, limits: Limits = USUAL, layers: Iterable[str] | None = None, weak: bool = False,
        readable: Iterable[str] = (),
    ) -> None:  # fmt: skip
        """As for `run_code`; the limit of seconds is that of a block. Between blocks all its processes stand still."""
        self._settings = settings_of(limits, layers, weak, readable, session=True)
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
