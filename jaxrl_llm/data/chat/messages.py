"""Messages in the usual form: texts, parts that are texts, and calls of tools with mappings as their arguments.

And the thoughts of today's families: how they are told apart from what is said.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from jaxrl_llm.utils.errors import InputError, shown

Message = Mapping[str, Any]
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
OPENED, CLOSED = "<think>", "</think>"


def plain_message(message: Message) -> dict[str, Any]:
    """A message in the usual form: without what is None, parts with their texts alone, and calls with mappings.

    The arguments of a call given as JSON text are read. Entries that are None are dropped: Arrow fills up the structs
    of a column with them. InputError for a part that is no text.
    """
    out = {name: value for name, value in message.items() if value is not None}
    content = out.get("content")
    if isinstance(content, list | tuple):
        out["content"] = [_plain_part(part, str(message.get("role"))) for part in content]
    if thought := next((out[name] for name in THOUGHTS if out.get(name)), None):
        out = {name: value for name, value in out.items() if name not in THOUGHTS} | {"reasoning_content": thought}
    if calls := out.pop("tool_calls", None):
        out |= {"content": out.get("content", ""), "tool_calls": [_plain_call(dict(call)) for call in calls]}
    return out


def has_thought(message: Message) -> bool:
    """Whether a message is a reply with a thought, apart or within its content."""
    apart = any(message.get(name) for name in THOUGHTS)
    return message["role"] == "assistant" and (apart or CLOSED in text_of_content(message.get("content")))


def text_of_content(content: Any) -> str:
    """A content as text: that of all its parts.

    >>> text_of_content([{"type": "text", "text": "2 + "}, {"type": "text", "text": "2?"}])
    '2 + 2?'
    """
    return "".join(part["text"] for part in content) if isinstance(content, list | tuple) else str(content or "")


def in_form(call: Mapping[str, Any], arguments: str) -> dict[str, Any]:
    """A call with its arguments as a "mapping" or as JSON "text"."""
    own = call["function"]
    if arguments == "text" and not isinstance(own["arguments"], str):
        own = {**own, "arguments": json.dumps(own["arguments"], ensure_ascii=False)}
    return {**call, "function": own}


def text_parts(text: str) -> list[dict[str, Any]]:
    """A text as the list of parts that some chat templates take."""
    return [{"type": "text", "text": text}]


def _plain_part(part: Any, role: str) -> dict[str, Any]:
    if not isinstance(part, Mapping) or part.get("type", "text") != "text" or not isinstance(part.get("text"), str):
        kind = part.get("type") if isinstance(part, Mapping) else shown(part)
        raise InputError(f"a part of a message of the role {role} is of type {kind}, but only texts are read")
    return {"type": "text", "text": part["text"]}


def _plain_call(call: dict[str, Any]) -> dict[str, Any]:
    own = dict(call.get("function") or {name: call[name] for name in ("name", "arguments") if name in call})
    arguments = own.get("arguments")
    if isinstance(arguments, str):
        try:
            read = json.loads(arguments, strict=False)
        except ValueError:
            read = None
        arguments = read if isinstance(read, dict) else arguments
    elif isinstance(arguments, Mapping):
        arguments = without_none(arguments)
    identity = {name: call[name] for name in ("id",) if call.get(name) is not None}
    return {"type": "function", **identity, "function": {"name": own.get("name"), "arguments": arguments or {}}}


def without_none(value: Any) -> Any:
    """A value whose mappings, at any depth, have no entries that are None."""
    if isinstance(value, Mapping):
        return {name: without_none(one) for name, one in value.items() if one is not None}
    return [without_none(one) for one in value] if isinstance(value, list | tuple) else value


class Channels(NamedTuple):
    """How a family tells its thoughts apart from what it says."""

    mark: str  # what its chat templates contain
    opened: str  # what opens a thought, if that is one text
    closed: str  # what closes a thought
    written: str  # a thought before what is said, with {} for its text, where the template writes none
    fields: Mapping[str, Any]
    """Of a `response_template`: how a thought begins and ends, and what is said if that has a beginning."""
    refused: str = "(?!)"  # a pattern of what its chat templates refuse within a text


CHANNELS = (
    Channels(
        CLOSED, OPENED, CLOSED, f"{OPENED}\n{{}}\n{CLOSED}\n\n",
        {"reasoning_content": {"open": OPENED, "close_pattern": rf"{CLOSED}\s*"}},
    ),
    Channels(
        "[/THINK]", "[THINK]", "[/THINK]", "[THINK]{}[/THINK]",
        {"reasoning_content": {"open": "[THINK]", "close_pattern": r"\[/THINK\]\s*"}},
    ),
    Channels(
        "<channel|>", "<|channel>thought", "<channel|>", "<|channel>thought\n{}\n<channel|>",
        {"reasoning_content": {"open_pattern": r"<\|channel>thought\n?", "close_pattern": r"\n?<channel\|>\s*"}},
    ),
    Channels(
        "<|channel|>analysis", "", "<|end|>", "<|channel|>analysis<|message|>{}<|end|><|start|>assistant",
        {
            "reasoning_content": {
                "open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>analysis<\|message\|>",
                "close_pattern": r"<\|end\|>",
            },
            "content": {"open_pattern": r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)<\|message\|>"},
        },
        r"<\|(?:start|channel|constrain|message|end|call|return)\|>",
    ),
)  # fmt: skip
"""Of the families that think: Qwen and many more, Mistral, Gemma 4, gpt-oss."""
NO_THOUGHTS = Channels("", "", "", CHANNELS[0].written, {})


def channels_of(template: str) -> Channels:
    """How a family with this chat template tells its thoughts; `NO_THOUGHTS` if the template does not show it."""
    return next((one for one in CHANNELS if one.mark in template), NO_THOUGHTS)
