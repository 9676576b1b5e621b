"""Text on the output of a server that is no message of its protocol."""

from __future__ import annotations

import logging
import threading

logger = logging.getLogger("jaxrl_llm.environments")
CLIENT = logging.getLogger("mcp.client.stdio")


class OtherText(logging.Filter):
    """Tells in one line that a server prints what is no message, instead of a traceback for each, and counts it."""

    def __init__(self, name: str, thread: threading.Thread) -> None:
        super().__init__()
        self._name, self._thread, self.count = name, thread, 0

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether a record is to be logged: those of other servers, and those that no printed line caused."""
        if threading.current_thread() is not self._thread or not record.exc_info:
            return True
        self.count += 1
        if self.count == 1:
            logger.warning(
                "the MCP server %s prints text to its stdout that is no message, which is left out: let it print that "
                "to stderr",
                self._name,
            )
        return False

    def end(self) -> None:
        """Say how much it was, if it was more than one line."""
        CLIENT.removeFilter(self)
        if self.count > 1:
            logger.warning("the MCP server %s printed %d lines that are no messages", self._name, self.count)
