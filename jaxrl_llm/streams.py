"""Output streams that tolerate a closed pipe or a full disk, which must not end a run."""

from __future__ import annotations

import contextlib
import os
from typing import Any, TextIO


class FailsafeStream:
    """A text stream whose writes never fail: unencodable text is escaped, and after an error text is dropped.

    stream: the underlying stream; None (standard output was closed before the start) drops everything.
    Other attributes, such as `encoding`, are those of the stream.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.lost = stream is None or stream.closed  # whether further text is dropped

    def write(self, text: str) -> int:
        """Write the text, unless the stream has failed; returns its length either way."""
        if not self.lost:
            assert self._stream is not None
            try:
                try:
                    self._stream.write(text)
                except UnicodeEncodeError:
                    encoding = self._stream.encoding or "ascii"
                    self._stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
            except (OSError, ValueError):  # OSError: no reader, or a full disk; ValueError: the stream is closed
                self._lose()
        return len(text)

    def flush(self) -> None:
        """Flush the stream, if possible."""
        if not self.lost:
            assert self._stream is not None
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._lose()

    def isatty(self) -> bool:
        """Whether the stream is a terminal that has not failed."""
        return not self.lost and self._stream is not None and self._stream.isatty()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self) -> None:
        self.lost = True
        send_to_null(self._stream)


def send_to_null(stream: TextIO | None) -> None:
    """Redirect a stream whose writes fail to the null device.

    Otherwise its buffered text would fail again when the interpreter exits, with a message and status 120.
    """
    if stream is None:
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no file descriptor, or closed
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, stream.fileno())
        finally:
            os.close(null)
        stream.flush()
