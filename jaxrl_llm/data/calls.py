"""Replies as messages: what the policy said, and which tools it called, read with the parser of transformers.

The format of calls is the tokenizer's `response_template` if it has one, else what its chat template writes for a call,
else that of Hermes, which `described` then explains to the policy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_llm.data.messages import Message, text_of
from jaxrl_llm.errors import InputError

if TYPE_CHECKING:
    from jaxrl_llm.data.turns import ChatTurns

INSTRUCTIONS = """You may call these tools:
<tools>
{tools}
</tools>
To call one, write a JSON object between tags:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""


class Call(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Any]


class Reply(NamedTuple):
    """A reply of the policy."""

    message: Message
    """{"role": "assistant", "content": text}, with "reasoning_content" and "tool_calls" if there are."""
    calls: tuple[Call, ...]
    fault: str | None = None
    """Why a call could not be read, in one line; None if all could."""


@dataclass(frozen=True, eq=False)
class Reading:
    """How the replies of one tokenizer are read."""

    tokenizer: Any
    template: Mapping[str, Any]
    """The `response_template` of transformers."""
    prefix: str
    """What the chat template writes at the beginning of each reply."""
    tools: tuple[Mapping[str, Any], ...] = ()

    def __call__(self, ids: Sequence[int]) -> Reply:
        """Read sampled token ids."""
        return self.text(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def text(self, text: str) -> Reply:
        """Read a reply's text, with its special tokens.

        A call that is not valid JSON, or has no name, makes the whole reply its content, and `fault` says why.
        """
        from transformers.utils.chat_parsing import parse_response

        try:
            found = parse_response(
                text, dict(self.template), prefix=self.prefix, tools=[dict(tool) for tool in self.tools] or None
            )
            calls = tuple(call_of(one) for one in found.get("tool_calls") or ())
        except Exception as error:  # the policy may write anything
            said = {"role": "assistant", "content": text}
            return Reply(said, (), " ".join(str(error).split())[:200])
        return Reply({"content": "", **found, "role": "assistant"}, calls)


def told(tools: Sequence[Mapping[str, Any]]) -> str:
    """What describes the tools and the format of calls to a policy whose chat template does not."""
    return INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))


def with_instructions(messages: Sequence[Message], text: str, system: bool = True) -> list[Message]:
    """The messages with a text at the end of the system message, else at the beginning of the first user message."""
    first = messages[0] if messages else {}
    content = text_of(first.get("content"))
    if system and first.get("role") == "system":
        return [{**first, "content": f"{content}\n\n{text}"}, *messages[1:]]
    if not system and first.get("role") == "user":
        return [{**first, "content": f"{text}\n\n{content}"}, *messages[1:]]
    return [{"role": "system" if system else "user", "content": text}, *messages]


def call_of(found: Mapping[str, Any]) -> Call:
    """A call from an entry of "tool_calls". ValueError if it is none."""
    function = found.get("function", found)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError('a call is a JSON object with "name" and "arguments"')
    arguments = function.get("arguments", function.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of {function['name']} are no JSON object")
    return Call(function["name"], arguments)


def reading_of(turns: ChatTurns) -> Reading:
    """How replies of this conversation's tokenizer are read.

    Raises InputError if there are tools, whose calls the chat template writes in a format that is not JSON, while the
    tokenizer has no `response_template`.
    """
    tokenizer, prefix = turns.tokenizer, turns.reply_start
    template = getattr(tokenizer, "response_template", None) or _template(turns, prefix)
    return Reading(tokenizer, template, prefix, turns.tools)


def _template(turns: ChatTurns, prefix: str) -> dict[str, Any]:
    """A response template from what the chat template writes for a call."""
    asked, end = [{"role": "user", "content": "x"}], (turns.reply_end or "").strip()
    call = {"type": "function", "id": "call00000", "function": {"name": "look", "arguments": {"text": "at it"}}}
    said = turns.written([*asked, {"role": "assistant", "content": "~"}])
    try:
        text = turns.written([*asked, {"role": "assistant", "content": "", "tool_calls": [call]}])
    except InputError:
        text = said
    same = next((i for i, (a, b) in enumerate(zip(text, said, strict=False)) if a != b), min(len(text), len(said)))
    written = text[same:]
    found = _json_call(written)
    if found is None and "look" in written and turns.tools:
        raise InputError(
            "the chat template writes calls of tools in a format other than JSON: set the tokenizer's response_template"
        )
    start, stop, value = (0, 0, {}) if found is None else found
    opened = written[:start].strip() if found else "<tool_call>"
    closed = written[stop:].strip().removesuffix(end).strip() if found else "</tool_call>"
    arguments = "parameters" if isinstance(value, dict) and "parameters" in value else "arguments"
    ends = "|".join(re.escape(one) for one in {end, *map(turns.tokenizer.decode, turns.stops)} if one) or "$"
    one = {"type": "function", "function": "{content}"}
    many = {"type": "function", "function": {"name": "{name}", "arguments": f"{{{arguments}}}"}}
    fields: dict[str, Any] = {
        "tool_calls": {
            # A call without an opening is a reply that is nothing else, which begins like an object with a name.
            **({"open": opened} if opened else {"open_pattern": r"^\s*(?=\{\s*\"name\")"}),
            "close_pattern": rf"{re.escape(closed)}\s*" if closed else f"(?:{ends})\\s*|$",
            "content": "json",
            **({"transform": many, "transform_each": True} if isinstance(value, list) else {"transform": one}),
            **({} if isinstance(value, list) else {"repeats": True}),
        },
        "content": {"close_pattern": rf"(?:{ends})\s*|$", "content": "text"},
    }
    if "</think>" in turns.template:
        fields["reasoning_content"] = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
    return {"defaults": {"role": "assistant"}, "start_anchor": prefix or "\n", "fields": fields}


def _json_call(text: str) -> tuple[int, int, Any] | None:
    """Where the JSON of the call of "look" is in a text, and its value: an object, or a list of objects."""
    for start, letter in enumerate(text):
        if letter not in "{[":
            continue
        try:
            value, stop = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            continue
        one = value[0] if isinstance(value, list) and value else value
        if isinstance(one, dict) and one.get("name") == "look":
            return start, stop, value
    return None
