"""Tools of servers that speak the Model Context Protocol, by the package mcp.

A server is a command, spoken to over its standard streams. Its connection lives in a thread with an event loop of its
own, because it has to be opened and closed in one task, while calls come from anywhere.
"""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import tempfile
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, NamedTuple

from jaxrl_llm.core.arguments.checks import checked
from jaxrl_llm.core.arguments.ranges import Seconds
from jaxrl_llm.environments.copies import NotCopiedError
from jaxrl_llm.environments.tools.base import EachEpisode, Kit
from jaxrl_llm.utils.errors import InputError, error_line, optional_package, shown, unknown

SECONDS = 30.0  # for the start of a server, and for a call


class Command(NamedTuple):
    """How a server is started."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    folder: str | None
    seconds: float


@checked
def mcp_server(
    command: str | Sequence[str],
    only: Sequence[str] = (),
    shared: bool = False,
    environment: Mapping[str, str] | None = None,
    folder: str | None = None,
    seconds: Seconds = SECONDS,
) -> EachEpisode:
    """The tools of an MCP server, with the names, descriptions and schemas that it gives.

    command: starts the server; a text is split as in a shell, which is not used. only: names of its tools that the
    policy gets; () for all. shared: one server for all episodes, which is closed when the program ends; else each
    episode starts its own with its first call, and ends it. environment: variables that the server gets beside PATH,
    HOME and the like. folder: where it runs. seconds: for its start, and for a call.

    A server that ends is started again by the next call. It is not in the sandbox: it may do what you may.

    Raises InputError if mcp is not installed, for an empty command, and, when an episode or `with_tools` makes the
    tools, for a server that does not start or lacks one of `only`.
    """
    words = tuple(shlex.split(command) if isinstance(command, str) else map(str, command))
    if not words:
        raise InputError("the command of an MCP server is empty: give its program and arguments")
    _package()
    started = Command(words, dict(environment or {}), folder, seconds)
    common, lock = _Server(started), threading.Lock()
    listed: list[tuple[dict[str, Any], ...]] = []

    def make() -> Kit:
        with lock:  # what tools there are is asked once
            server = common if shared else _Server(started)
            if not listed:
                listed.append(server.schemas(only))
            return _Tools(server, listed[0], shared)

    return EachEpisode(make)


def _package() -> Any:
    with optional_package("mcp", "mcp", "tools of an MCP server"):
        import mcp
    if not hasattr(mcp, "Client"):
        raise InputError("tools of an MCP server need version 2 or later of mcp: pip install 'jaxrl_llm[mcp]'")
    return mcp


class _Tools:
    def __init__(self, server: _Server, schemas: Sequence[Mapping[str, Any]], shared: bool) -> None:
        self._server, self._shared = server, shared
        self.functions = tuple(_tool(server, schema) for schema in schemas)

    def copy(self) -> _Tools:
        """The tools of a shared server. NotCopiedError for one of the episode's own."""
        if not self._shared:
            raise NotCopiedError("the state of its MCP server cannot be read")
        return self

    def close(self) -> None:
        """End the server, unless it is shared."""
        if not self._shared:
            self._server.close()


def _tool(server: _Server, schema: Mapping[str, Any]) -> Callable[..., str]:
    name = schema["function"]["name"]

    def tool(**arguments: Any) -> str:
        return server.call(name, arguments)

    tool.__name__ = name
    tool.schema = schema  # type: ignore[attr-defined]
    return tool


class _Server:
    """A server, which is started when it is first needed, and again when it has ended."""

    def __init__(self, command: Command) -> None:
        self._command, self._lock, self._closed = command, threading.Lock(), False
        self._open: list[_Connection] = []
        self._end = weakref.finalize(self, _close_all, self._open)  # also if the episode is abandoned

    def _connection(self) -> _Connection:
        with self._lock:
            if self._closed:
                raise RuntimeError("the conversation is over")
            if self._open and self._open[-1].ended:
                _close_all(self._open)
            if not self._open:
                self._open.append(_Connection(self._command))
            return self._open[-1]

    def schemas(self, only: Sequence[str]) -> tuple[dict[str, Any], ...]:
        """Of its tools, in its order."""
        found = self._connection().tools
        known = [one.name for one in found]
        for name in only:
            if name not in known:
                self.close()
                raise unknown(f"tool of {self._command.words[0]}", name, known)
        return tuple(
            {
                "type": "function",
                "function": {"name": one.name, "description": one.description or "", "parameters": one.input_schema},
            }
            for one in found
            if not only or one.name in only
        )  # fmt: skip

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of a tool's result. RuntimeError if the tool says that it failed, or the server has ended."""
        found = self._connection().call(name, dict(arguments))
        text = "\n".join(map(_text, found.content))
        if not text and found.structured_content is not None:
            text = json.dumps(found.structured_content)
        if found.is_error:
            raise RuntimeError(text or f"{name} failed")
        return text

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._end()


def _close_all(connections: list[_Connection]) -> None:
    while connections:
        connections.pop().close()


def _text(block: Any) -> str:
    """A block of a result; what is no text is named only."""
    if isinstance(text := getattr(block, "text", None), str):
        return text
    resource = getattr(block, "resource", None)
    if isinstance(text := getattr(resource, "text", None), str):
        return text
    return f"[{getattr(block, 'type', 'content')}, which is not shown]"


class _Connection:
    """A started server. InputError if it does not start."""

    def __init__(self, command: Command) -> None:
        self._command = command
        self._loop, self._over = asyncio.new_event_loop(), asyncio.Event()
        self._client: Any = None
        self.tools: list[Any] = []
        self.ended = False
        ready: Future[None] = Future()
        self._said = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - the server's stderr; see close
        self._thread = threading.Thread(target=self._work, args=(ready,), daemon=True, name="MCP server")
        self._other = OtherText(shown(" ".join(command.words)), self._thread)
        CLIENT.addFilter(self._other)
        self._thread.start()
        try:
            ready.result(command.seconds + 5)
        except Exception as error:
            why = self._why(error)
            self.close()
            raise InputError(f"the MCP server {shown(' '.join(command.words))} did not start: {why}") from None

    def _why(self, error: BaseException) -> str:
        with suppress(OSError, ValueError):
            self._said.seek(0)
            if lines := self._said.read()[-2000:].strip().splitlines():
                return lines[-1][:200]
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        if isinstance(error, TimeoutError):
            return f"it gave no answer within {self._command.seconds:g} s"
        return error_line(error)

    def _work(self, ready: Future[None]) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve(ready))
        except BaseException as error:
            if not ready.done():
                ready.set_exception(error)
        finally:
            self.ended = True
            self._loop.close()

    async def _serve(self, ready: Future[None]) -> None:
        from mcp.client.stdio import StdioServerParameters, stdio_client

        words, environment, folder, seconds = self._command
        how = StdioServerParameters(command=words[0], args=words[1:], env=dict(environment) or None, cwd=folder)
        async with asyncio.timeout(seconds) as opening:
            async with _package().Client(stdio_client(how, errlog=self._said), read_timeout_seconds=seconds) as client:
                cursor = None
                while True:
                    page = await client.list_tools(cursor=cursor)
                    self.tools += page.tools
                    if not (cursor := page.next_cursor):
                        break
                opening.reschedule(None)
                self._client = client
                ready.set_result(None)
                await self._over.wait()

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        if self.ended:
            raise RuntimeError("the server of this tool has ended")
        try:
            return asyncio.run_coroutine_threadsafe(self._client.call_tool(name, arguments), self._loop).result()
        except Exception as error:
            if "closed" in str(error).lower():  # the server's end of the pipe
                self.close()
                raise RuntimeError("the server of this tool has ended; call again to start another") from None
            raise RuntimeError(str(error) or type(error).__name__) from None

    def close(self) -> None:
        """End the server and its thread."""
        self.ended = True
        with suppress(RuntimeError):  # its loop is closed
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10.0)
        self._other.end()
        self._said.close()


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
