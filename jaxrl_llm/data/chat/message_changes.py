"""Forms in which messages are given to a chat template: changes that lose nothing, and the messages in them."""

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jaxrl_llm.data.chat.call_formats import as_hermes, format_by_mark
from jaxrl_llm.data.chat.messages import CLOSED, OPENED, channels_of, has_thought, in_form, text_of_content, text_parts
from jaxrl_llm.data.chat.rendering import Rendering

NONCE = f"q{secrets.token_hex(4)}"
_ROLES = {"developer": "system", "function": "tool"}


@dataclass(frozen=True)
class Form:
    """How a message is given to the template."""

    role: str | None = None  # instead of its own
    content: str = "own"  # "text": parts as one; "empty": a text where there is none
    arguments: str = "mapping"  # or "text": JSON
    calls: str = "own"  # "written": within the content
    thought: str = "own"  # "written": within the content, as the template writes that of a last reply
    name: str = "own"  # "written": before the content


Change = Callable[[Form, Mapping[str, Any]], Form | None]
Move = tuple[str, Change]


def _where(applies: Callable[[Mapping[str, Any]], object], **change: str) -> Change:
    """The change of a form for the messages that it applies to; None for others."""
    return lambda form, message: replace(form, **change) if applies(message) else None


as_user = _where(lambda message: message["role"] in ("tool", "function"), role="user")
"""A tool's result as a user's message."""

MOVES: tuple[Move, ...] = (
    ("content", _where(lambda message: "content" not in message, content="empty")),
    ("content", _where(lambda message: isinstance(message.get("content"), list), content="text")),
    ("call", _where(lambda message: message.get("tool_calls"), arguments="text")),
    (
        "content",
        lambda form, message: replace(form, role=_ROLES[message["role"]]) if message["role"] in _ROLES else None,
    ),
    ("content", as_user),
    ("call", _where(lambda message: message.get("tool_calls"), calls="written")),
    ("thought", _where(has_thought, thought="written")),
    ("name", _where(lambda message: "name" in message, name="written")),
)


def applied(
    rendering: Rendering, messages: Sequence[dict[str, Any]], forms: Sequence[Form]
) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The messages in these forms, and texts by the placeholders that stand for them."""
    out: list[dict[str, Any]] = []
    instead: dict[str, str] = {}
    answers = False  # whether the last message is of results that a user gives
    for number, (message, form) in enumerate(zip(messages, forms, strict=True)):
        one = dict(message)
        if form.name == "written":
            said, before = one.get("content"), f"{one.pop('name')}: "
            one["content"] = [*text_parts(before), *said] if isinstance(said, list) else before + text_of_content(said)
        if form.content in ("text", "empty"):
            one["content"] = text_of_content(one.get("content"))
        if "tool_calls" in one:
            one["tool_calls"] = [in_form(call, form.arguments) for call in one["tool_calls"]]
        if form.calls == "written" and (calls := one.pop("tool_calls", None)):
            written = (format_by_mark(rendering).write or as_hermes)([call["function"] for call in calls])
            one["content"] = f"{text_of_content(one.get('content'))}\n{written}".lstrip("\n")
        if form.thought == "written":
            one, own = _with_thought(rendering, one, f"{NONCE}kept{number}kept")
            instead |= own
        if form.role is not None:
            answers_too = message["role"] in ("tool", "function") and form.role == "user"
            one = {name: value for name, value in one.items() if name not in ("name", "tool_call_id")}
            one["role"] = form.role
            if answers and answers_too:
                out[-1]["content"] = f"{text_of_content(out[-1]['content'])}\n{text_of_content(one['content'])}"
                continue
            answers = answers_too
        else:
            answers = False
        out.append(one)
    return out, instead


def _with_thought(
    rendering: Rendering, message: dict[str, Any], placeholder: str
) -> tuple[dict[str, Any], dict[str, str]]:
    """The reply with a placeholder as its content, and what stands for it: the thought, as a last reply has it."""
    content = text_of_content(message.get("content"))
    thought = message.get("reasoning_content")
    if thought is None:
        before, _, content = content.rpartition(CLOSED)
        thought, content = before.replace(OPENED, "").strip("\n"), content.lstrip("\n")
    first, last = f"{NONCE}thought", f"{NONCE}said"
    question = {"role": "user", "content": "x"}
    said = {"role": "assistant", "content": last}
    asked = rendering.written([question])
    usual = _between(asked, rendering.written([question, said, question]), last)
    whole = _between(asked, rendering.written([question, {**said, "reasoning_content": first}]), last)
    if first not in whole:
        whole = usual + channels_of(rendering.template).written.format(first)
    out = {name: value for name, value in message.items() if name != "reasoning_content"} | {"content": placeholder}
    return out, {usual + placeholder: whole.replace(first, str(thought)) + content}


def _between(start: str, text: str, end: str) -> str:
    """What is between a start and an end of a text; empty if there is no such."""
    return text[len(start) : text.index(end)] if text.startswith(start) and end in text else ""
