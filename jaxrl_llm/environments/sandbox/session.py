"""A session: blocks of code that share their variables, in one sandboxed interpreter."""

from __future__ import annotations

import os
import secrets
import select
import subprocess
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache

from jaxrl_llm.environments.sandbox.run import TICK, USUAL, Box, Limits, Result, kill, over


@cache
def _starter(process: int) -> ThreadPoolExecutor:
    """A thread that lives as long as this process: namespaces end with the thread that started them."""
    return ThreadPoolExecutor(1, "sandbox")


class Session:
    """An interpreter that is started with its first block. One that exceeds a limit is killed; the next starts anew."""

    def __init__(
        self, limits: Limits = USUAL, layers: Iterable[str] | None = None, weak: bool = False,
        readable: Iterable[str] = (),
    ) -> None:  # fmt: skip
        """As for `run_code`; the limit of seconds is that of a block."""
        self._box = Box(limits, layers, weak, readable)
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, code: str) -> Result:
        """Run a block. Errors with their traceback, and the value of a last line that is an expression, are in stdout.

        What the block writes to stderr is there too, in its order.
        """
        began, end = time.monotonic(), f"end of {secrets.token_hex(8)}"
        if self._process is None or self._process.poll() is not None:
            self._process = _starter(os.getpid()).submit(self._box.start, session=True).result()
        process, limits = self._process, self._box.limits
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):
            process.stdin.write(ascii({"code": code, "end": end}).encode() + b"\n")
            process.stdin.flush()
        text, mark, stopped = bytearray(), f"{end}\n".encode(), None
        while not text.endswith(mark):
            left = began + limits.seconds - time.monotonic()
            if left <= 0:
                stopped = "seconds"
            elif not select.select([process.stdout], [], [], min(TICK, left))[0]:
                stopped = over(process, limits)
            else:
                data = os.read(process.stdout.fileno(), 65536)
                if not data:
                    break
                text += data
                if len(text) > limits.output:  # what is more is dropped, but for its end
                    text = text[: limits.output - len(mark)] + text[-len(mark) :]
            if stopped is not None:
                break
        whole = text.endswith(mark)
        said = bytes(text).removesuffix(mark).decode("utf-8", "replace")
        status = 0 if whole else None
        if not whole:
            kill(process)
            code_of = process.wait()
            status = None if stopped else code_of
            self._process = None
        return Result(said, "", status, stopped, time.monotonic() - began)

    def close(self) -> None:
        """End the interpreter and remove its folder."""
        if self._process is not None:
            kill(self._process)
            self._process.wait()
            self._process = None
        self._box.close()
