"""Tools whose answers are kept in a file, so that every run sees the same world, and needs no service for it."""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from jaxrl_llm.core.arguments.checks import checked
from jaxrl_llm.environments.tools.base import EachEpisode, Tool, Toolbox, result_text
from jaxrl_llm.utils.errors import InputError, shown
from jaxrl_llm.utils.threads import called, in_thread


@checked
def kept(path: str | Path, tools: Sequence[Tool] = ()) -> EachEpisode:
    """Tools whose answers are kept in a file, by name and arguments.

    tools: are asked where the file has no answer yet, and what they answer is added to it; their errors are not.
    Without tools the file alone answers, which also has their descriptions: a call that it has no answer to is an
    error, which the policy is told, and `failed_calls` counts. For tools whose answers depend on their arguments alone,
    since a call that is answered from the file does not reach them.

    The file has JSON lines: {"tool": SCHEMA}, and {"name", "arguments", "answer": TEXT}. Of several answers to one call
    the first counts. Arguments are compared as they were written: a default that is left out is another call.

    Raises InputError for a file that cannot be read, and for none where there are no tools.
    """
    answers = _Answers(Path(path).expanduser(), not tools)
    return EachEpisode(lambda: _Kept(answers, Toolbox(tools)))


@dataclass(eq=False)
class _Answers:
    """The file. Two are equal to a resumed run if their path is, and what they say where nothing is added to it."""

    path: Path
    alone: bool
    digest: str = ""

    def __post_init__(self) -> None:
        self._lock, self._known = threading.Lock(), dict[tuple[str, str], str]()
        self.schemas: dict[str, Mapping[str, Any]] = {}
        if not self.path.exists():
            if self.alone:
                raise InputError(f"{self.path} does not exist: give the tools too, whose answers are kept there")
            return
        text = self.path.read_text("utf-8")
        for number, line in enumerate(text.split("\n"), start=1):
            try:
                if line.strip():
                    self._read(json.loads(line))
            except (ValueError, TypeError, KeyError):
                raise InputError(
                    f"{self.path}, line {number}, is no tool and no answer: delete it, or name another file"
                ) from None
        if self.alone:
            self.digest = hashlib.sha256(text.encode()).hexdigest()
            if not self.schemas:
                raise InputError(f"{self.path} describes no tools: give the tools too, whose answers are kept there")

    def _read(self, line: Mapping[str, Any]) -> None:
        if "tool" in line:
            self.schemas[line["tool"]["function"]["name"]] = line["tool"]
        else:
            self._known.setdefault((line["name"], _text(line["arguments"])), line["answer"] + "")

    def _add(self, line: Mapping[str, Any]) -> None:
        self._read(line)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{_text(line)}\n")

    def describe(self, name: str, schema: Mapping[str, Any]) -> None:
        """Keep the description of a tool, unless it is the one that is kept."""
        with self._lock:
            if self.schemas.get(name) != schema:
                self._add({"tool": schema})

    async def ask(self, name: str, function: Callable[..., Any] | None, arguments: Mapping[str, Any]) -> str:
        """The answer that is kept, or else what the function says. LookupError without either."""
        key = name, _text(arguments)
        if key not in self._known:
            if function is None:
                raise LookupError(f"no answer of {name} to {shown(dict(arguments))} is kept")
            found = await called(partial(function, **arguments))
            text = await in_thread(result_text, found, sys.maxsize)
            with self._lock:
                if key not in self._known:  # another episode may have asked the same meanwhile
                    self._add({"name": name, "arguments": dict(arguments), "answer": text})
        return self._known[key]


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)


class _Kept:
    def __init__(self, answers: _Answers, box: Toolbox) -> None:
        self._answers, self._box = answers, box
        for name, schema in zip(box.functions, box.schemas, strict=True):
            answers.describe(name, schema)
        names = answers.schemas if answers.alone else box.functions
        self.functions = tuple(self._tool(name, box.functions.get(name)) for name in names)

    def _tool(self, name: str, function: Callable[..., Any] | None) -> Callable[..., Any]:
        async def tool(**arguments: Any) -> str:
            return await self._answers.ask(name, function, arguments)

        tool.__name__ = name
        tool.schema = self._answers.schemas[name]  # type: ignore[attr-defined]
        return tool

    def copy(self) -> _Kept:
        """The same answers, with a copy of what the tools keep; see `Toolbox.copy`."""
        return _Kept(self._answers, self._box.copy())

    def close(self) -> None:
        self._box.close()
