"""Tools: plain or async functions that the policy calls by name, and environments that consist of them.

A tool that keeps something over the calls of an episode, such as a session or a folder, is an `EachEpisode`.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from jaxrl_llm.core.arguments.checks import checked
from jaxrl_llm.core.arguments.ranges import Count, Seconds
from jaxrl_llm.data.chat.calls import ReadCall, Reply
from jaxrl_llm.environments.copies import NotCopiedError
from jaxrl_llm.environments.protocol import MakeEnvironment, Observation
from jaxrl_llm.utils.errors import InputError, shown
from jaxrl_llm.utils.threads import called, error_in_words, in_thread

MOST_CHARACTERS = 20_000  # of a result, unless an environment says otherwise
SECONDS = 30.0  # that a call may take


class Kit(Protocol):
    """Tools that share something which has to be closed: a session, a folder, a connection."""

    @property
    def functions(self) -> Sequence[Callable[..., Any]]:
        """The tools."""

    def close(self) -> None:
        """End what they share. Nothing happens the second time."""

    # A kit may have copy() -> Kit, which returns another in the same state that shares nothing with it.


@dataclass(frozen=True)
class EachEpisode:
    """Tools that every episode has of its own; a tool wherever functions are."""

    make: Callable[[], Kit]
    """Makes those of an episode. InputError if they cannot work here, as where a package is not installed."""

    def __call__(self) -> Kit:
        return self.make()


Tool = Callable[..., Any] | EachEpisode


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a tool: its attribute `schema`, or made from its signature and docstring.

    InputError if it is not described.
    """
    if isinstance(schema := getattr(function, "schema", None), Mapping):
        return dict(schema)
    from transformers.utils import get_json_schema

    try:
        return dict(get_json_schema(function))
    except Exception as error:
        name = getattr(function, "__name__", shown(function))
        raise InputError(
            f"the tool {name} is not described: give it type hints, and a docstring whose 'Args:' name each argument "
            f"({' '.join(str(error).split())[:160]})"
        ) from None


def result_text(value: Any, most: int = MOST_CHARACTERS) -> str:
    """A tool's result as the policy sees it: its `str`, `shortened` to `most` characters.

    Raises TypeError for bytes, which are no text.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"the result is {len(value)} bytes, which are no text")
    return shortened(str(value), most).encode("utf-8", "replace").decode()


def shortened(text: str, most: int) -> str:
    """A text, or if it has more than `most` characters its beginning and its end, where errors are told.

    >>> shortened("abcdefghij", 4)
    'ab\\n[... 6 characters are left out ...]\\nij'
    """
    if len(text) <= most:
        return text
    head, tail = text[: most - most // 2], text[len(text) - most // 2 :]
    return f"{head}\n[... {len(text) - most:,} characters are left out ...]\n{tail}"


class Toolbox:
    """Answers the calls of a reply. A tool that raises, hangs or is unknown gives an error as its result."""

    def __init__(self, tools: Sequence[Tool], seconds: float = SECONDS, most: int = MOST_CHARACTERS) -> None:
        """seconds: that a call may take. most: characters of a result.

        Raises InputError for two tools of one name, and for what is no tool.
        """
        self.functions: dict[str, Callable[..., Any]] = {}
        self._kits: list[Kit] = []
        self._tools, self.seconds, self.most = tuple(tools), seconds, most
        try:
            for tool in tools:
                self._add(tool)
            self.schemas = tuple(schema_of(function) for function in self.functions.values())
        except BaseException:
            self.close()
            raise

    def _add(self, tool: Tool) -> None:
        functions: Sequence[Callable[..., Any]]
        if isinstance(tool, EachEpisode):
            self._kits.append(tool())
            functions = self._kits[-1].functions
        else:
            functions = [tool]
        for function in functions:
            name = getattr(function, "__name__", None)
            if not callable(function) or name is None:
                raise InputError(f"a tool is a function, but found {shown(function)}")
            if name in self.functions:
                raise InputError(f"two tools are called {name}: give each its own name")
            self.functions[name] = function

    def close(self) -> None:
        """Close what the tools keep, all of it even if one raises."""
        with ExitStack() as stack:
            for kit in self._kits:
                stack.callback(kit.close)
            self._kits.clear()

    def copy(self, instead: Sequence[Callable[..., Any]] = ()) -> Toolbox:
        """The same tools, with copies of what they keep; their functions are shared, as all episodes share them.

        instead: functions in place of the last ones. Raises NotCopiedError for tools that keep what has no copy.
        """
        box = copy.copy(self)
        box._kits, box.functions = [], {}
        kits = iter(self._kits)
        try:
            for tool in (*self._tools[: len(self._tools) - len(instead)], *instead):
                box._add(EachEpisode(partial(_copy_of, next(kits))) if isinstance(tool, EachEpisode) else tool)
        except BaseException:
            box.close()
            raise
        box._tools = (*self._tools[: len(self._tools) - len(instead)], *instead)
        return box

    async def answer(self, reply: Reply) -> Observation:
        """The results of a reply's calls, in order, as messages; `done` for a reply without calls.

        info: "calls", of them "failed_calls", and "cut_observations" of their results; "malformed_calls" for
        calls that could not be read, which their results say, or a user message where no call could; "lenient_calls"
        that are not quite in their format.
        """
        if reply.fault is not None:
            told = f"Error: the call of a tool could not be read: {reply.fault}"
            return Observation([{"role": "user", "content": told}], info={"malformed_calls": 1.0})
        if not reply.calls:
            return Observation(done=True)
        answers = [await self._one(call) for call in reply.calls]
        messages = [
            {"role": "tool", "name": call.name, "content": text}
            for call, (text, _) in zip(reply.calls, answers, strict=True)
        ]
        for one in reply.broken:
            told = f"Error: the call could not be read: {one.why}"
            messages.insert(one.place, {"role": "tool", "name": one.name, "content": told})
        counts = {
            "calls": len(answers),
            "failed_calls": sum(not right for _, right in answers),
            "cut_observations": sum(len(text) > self.most for text, _ in answers),  # with the note that says so
            **({"malformed_calls": len(reply.broken)} if reply.broken else {}),
            **({"lenient_calls": reply.lenient} if reply.lenient else {}),
        }
        return Observation(messages, info={name: float(count) for name, count in counts.items()})

    async def _one(self, call: ReadCall) -> tuple[str, bool]:
        function = self.functions.get(call.name)
        if function is None:
            return f"Error: there is no tool {shown(call.name)}, but {', '.join(self.functions) or 'none'}", False

        async def result() -> str:
            value = await called(partial(function, **call.arguments))
            return str(await in_thread(result_text, value, self.most))  # its `__str__` may take long, too

        try:
            return await asyncio.wait_for(result(), self.seconds), True
        except TimeoutError:
            return f"Error: {call.name} did not answer within {self.seconds:g} s", False
        except Exception as error:
            text = error_in_words(error)
            for _ in range(2):  # errors in threads are RuntimeErrors that name their type
                text = text.removeprefix("RuntimeError: ")
            return result_text(f"Error: {text}", self.most), False


def _copy_of(kit: Kit) -> Kit:
    own = getattr(kit, "copy", None)
    if own is None:
        raise NotCopiedError(f"its tools keep {type(kit).__name__}, which has no method copy()")
    made: Kit = own()
    return made


@checked
def with_tools(tools: Sequence[Tool], seconds: Seconds = SECONDS, most: Count = MOST_CHARACTERS) -> MakeEnvironment:
    """What makes environments of these tools alone, as `rollouts.agents.agent` takes it.

    seconds: that a call may take. most: characters of a result. Raises InputError for tools without a description, with
    the same name, or that cannot work here, before any episode begins.
    """
    WithTools(tools, seconds, most).close()
    return lambda row: WithTools(tools, seconds, most)


class WithTools:
    """An environment of tools alone: over when the policy replies without a call."""

    def __init__(self, tools: Sequence[Tool], seconds: float = SECONDS, most: int = MOST_CHARACTERS) -> None:
        self._box = Toolbox(tools, seconds, most)
        self.tools = self._box.schemas

    def copy(self) -> WithTools:
        """The same tools with copies of what they keep; see `Toolbox.copy`."""
        other = copy.copy(self)
        other._box = self._box.copy()
        return other

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Nothing is added to the prompt."""
        return Observation()

    async def step(self, reply: Reply) -> Observation:
        """The results of the calls."""
        return await self._box.answer(reply)

    def close(self) -> None:
        """Close what the tools keep."""
        self._box.close()
