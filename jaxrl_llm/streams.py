"""Standard output that may go away: a closed pipe or a full disk under it must not end what is being done."""

from __future__ import annotations

import contextlib
import os
from typing import Any, TextIO


class FailsafeStream:
    """A text stream that takes whatever is written: what its file cannot show is escaped, and once it fails, dropped.

    stream: where the text goes; None (standard output was closed before the start) drops everything.
    Everything else, such as `isatty` and `encoding`, is the stream's own.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.lost = stream is None or stream.closed  # whether the rest is dropped

    def write(self, text: str) -> int:
        """Write the text if the stream still takes it; its length either way."""
        if not self.lost:
            assert self._stream is not None
            try:
                try:
                    self._stream.write(text)
                except UnicodeEncodeError:
                    encoding = self._stream.encoding or "ascii"
                    self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            except (OSError, ValueError):  # the pipe has no reader, the disk is full; the stream is closed
                self._lose()
        return len(text)

    def flush(self) -> None:
        """Pass on what is buffered, if that is possible."""
        if not self.lost:
            assert self._stream is not None
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._lose()

    def isatty(self) -> bool:
        """Whether it is a terminal that still takes text."""
        return not self.lost and self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self) -> None:
        self.lost = True
        send_to_null(self._stream)


def send_to_null(stream: TextIO | None) -> None:
    """Point a stream whose writes fail at the null device.

    What it still buffers would fail again when the interpreter ends, with a message and status 120.
    """
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it has no file of its own, or is closed
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)
        stream.flush()
