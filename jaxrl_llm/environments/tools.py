"""Tools: plain or async functions that the policy calls by name, and environments that consist of them."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_llm.data.calls import Call, Reply
from jaxrl_llm.environments.protocol import Observation
from jaxrl_llm.errors import InputError, shown
from jaxrl_llm.threads import in_thread

MOST_CHARACTERS = 20_000  # of a result, unless an environment says otherwise
SECONDS = 30.0  # that a call may take


def schema_of(function: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a tool from its signature and docstring. InputError if it is not described."""
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
    """A tool's result as the policy sees it: its `str`, cut after `most` characters, which the text then says.

    Raises TypeError for bytes, which are no text.
    """
    if isinstance(value, bytes | bytearray | memoryview):
        raise TypeError(f"the result is {len(value)} bytes, which are no text")
    text = str(value).encode("utf-8", "replace").decode()
    return text if len(text) <= most else f"{text[:most]}\n[cut: the result has {len(text):,} characters]"


class Toolbox:
    """Answers the calls of a reply. A tool that raises, hangs or is unknown gives an error as its result."""

    def __init__(
        self, functions: Sequence[Callable[..., Any]], seconds: float = SECONDS, most: int = MOST_CHARACTERS
    ) -> None:
        """seconds: that a call may take. most: characters of a result. InputError for two tools of one name."""
        self.functions: dict[str, Callable[..., Any]] = {}
        for function in functions:
            if function.__name__ in self.functions:
                raise InputError(f"two tools are called {function.__name__}: give each its own name")
            self.functions[function.__name__] = function
        self.schemas = tuple(schema_of(function) for function in functions)
        self.seconds, self.most = seconds, most

    async def answer(self, reply: Reply) -> Observation:
        """The results of a reply's calls, in order, as messages; `done` for a reply without calls.

        info: "calls", and of them "failed_calls"; "malformed_calls" for a call that could not be read, which a user
        message says.
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
        failed = float(sum(not right for _, right in answers))
        return Observation(messages, info={"calls": float(len(answers)), "failed_calls": failed})

    async def _one(self, call: Call) -> tuple[str, bool]:
        function = self.functions.get(call.name)
        if function is None:
            return f"Error: there is no tool {call.name!r}, but {', '.join(self.functions)}", False
        try:
            if inspect.iscoroutinefunction(function):
                value = await asyncio.wait_for(function(**call.arguments), self.seconds)
            else:
                value = await asyncio.wait_for(in_thread(lambda: function(**call.arguments)), self.seconds)
            return result_text(value, self.most), True
        except TimeoutError:
            return f"Error: {call.name} did not answer within {self.seconds:g} s", False
        except Exception as error:
            text = str(error) if isinstance(error, RuntimeError) else f"{type(error).__name__}: {error}"
            return result_text(f"Error: {text}", self.most), False


class WithTools:
    """An environment of tools alone: over when the policy replies without a call."""

    def __init__(self, functions: Sequence[Callable[..., Any]], seconds: float = SECONDS) -> None:
        self._box = Toolbox(functions, seconds)
        self.tools = self._box.schemas

    def reset(self, row: Mapping[str, Any], seed: int) -> Observation:
        """Nothing is added to the prompt."""
        return Observation()

    async def step(self, reply: Reply) -> Observation:
        """The results of the calls."""
        return await self._box.answer(reply)

    def close(self) -> None:
        """Nothing is left open."""
