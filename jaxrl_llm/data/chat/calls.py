"""Replies as messages: what the policy said, and which tools it called, read with the parser of transformers.

The format of calls is the tokenizer's `response_template` if it has one, else what its chat template writes for a call,
else that of Hermes, which `described` then explains to the policy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxrl_llm.data.chat.families import Parse, parser_of
from jaxrl_llm.data.chat.lenient import BrokenCall, Call, CallFormat, call_of, read_calls
from jaxrl_llm.data.chat.message_forms import fitted
from jaxrl_llm.data.chat.messages import CLOSED, Message, text_of
from jaxrl_llm.utils.errors import InputError

if TYPE_CHECKING:
    from jaxrl_llm.data.chat.turns import ChatTurns

NEXT = r"\n+(?:User|System|Result):"
"""What begins the next turn in `rendering.DIALECT`."""

INSTRUCTIONS = """You may call these tools:
<tools>
{tools}
</tools>
To call one, write a JSON object between tags:
<tool_call>
{{"name": "NAME", "arguments": {{"ARGUMENT": "VALUE"}}}}
</tool_call>"""


class Reply(NamedTuple):
    """A reply of the policy."""

    message: Message
    """{"role": "assistant", "content": text}, with "reasoning_content" and "tool_calls" if there are."""
    calls: tuple[Call, ...]
    fault: str | None = None
    """Why no call could be read, in one line; None if one could, or there are none."""
    broken: tuple[BrokenCall, ...] = ()
    """Calls that could not be read, beside others that could."""
    lenient: int = 0
    """How many of the calls are not quite in their format."""


@dataclass(frozen=True, eq=False)
class Reading:
    """How the replies of one tokenizer are read."""

    tokenizer: Any
    template: Mapping[str, Any]
    """The `response_template` of transformers."""
    prefix: str
    """What the chat template writes at the beginning of each reply."""
    tools: tuple[Mapping[str, Any], ...] = ()
    form: CallFormat | None = None
    """How calls are written, where that is JSON and `template` was made of it."""
    next_turn: str | None = None
    """A pattern of what begins the next turn, which a model goes on with that was trained on no turns."""
    parse: Parse | None = None
    """What reads token ids instead, where calls are no JSON."""

    def __call__(self, ids: Sequence[int]) -> Reply:
        """Read sampled token ids."""
        if self.parse is not None:
            return _of_parsed(self.parse(ids), lambda: str(self.tokenizer.decode(list(ids), skip_special_tokens=False)))
        return self.text(self.tokenizer.decode(list(ids), skip_special_tokens=False))

    def text(self, text: str) -> Reply:
        """Read a reply's text, with its special tokens.

        Calls are read leniently (`data.chat.lenient`), one by one. Where none can be read, the whole reply is its
        content, and `fault` says why.
        """
        if self.parse is not None:
            return self(self.tokenizer.encode(text, add_special_tokens=False))
        text = text if self.next_turn is None else re.split(self.next_turn, text, maxsplit=1)[0]
        found, wrong = self._parsed(text, self.template)
        if self.form is None:
            return self._strict(text, found, wrong)
        thought = text.rfind(CLOSED) + len(CLOSED) if CLOSED in text and "reasoning_content" in self._fields else 0
        read = read_calls(text[thought:], self.form)
        strict = self._strict(text, found, wrong)
        if strict.fault is None and not read.broken and not read.lenient and len(strict.calls) == len(read.calls):
            return strict
        if not read.calls:
            why = read.broken[0].why if read.broken else strict.fault
            return strict if why is None else Reply({"role": "assistant", "content": text}, (), why)
        others = {**self.template, "fields": {name: x for name, x in self._fields.items() if name != "tool_calls"}}
        said, _ = self._parsed(text[:thought] + read.rest, others)
        message = _with_calls({"content": "", **(said or {}), "role": "assistant"}, read.calls, read.broken)
        return Reply(message, read.calls, None, read.broken, read.lenient)

    @property
    def _fields(self) -> dict[str, Any]:
        return dict(self.template.get("fields", {}))

    def _parsed(self, text: str, template: Mapping[str, Any]) -> tuple[dict[str, Any] | None, str]:
        """The fields of a reply, or None and why not."""
        from transformers.utils.chat_parsing import parse_response

        try:
            tools: Any = [dict(tool) for tool in self.tools] or None
            return dict(parse_response(text, dict(template), prefix=self.prefix, tools=tools)), ""
        except Exception as error:  # the policy may write anything
            return None, " ".join(str(error).split())[:200]

    def _strict(self, text: str, found: dict[str, Any] | None, wrong: str) -> Reply:
        try:
            if found is None:
                raise ValueError(wrong)
            calls = tuple(call_of(one) for one in found.get("tool_calls") or ())
        except ValueError as error:
            return Reply({"role": "assistant", "content": text}, (), " ".join(str(error).split())[:200])
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


def _of_parsed(found: Any, text: Callable[[], str]) -> Reply:
    """A reply from a `renderers.ParsedResponse`. text: of the whole reply."""
    calls: list[Call] = []
    broken: list[BrokenCall] = []
    for one in found.tool_calls:
        arguments = one.arguments
        if one.status == "ok" and isinstance(one.name, str) and isinstance(arguments, Mapping):
            calls.append(Call(one.name, arguments))
        else:
            why = f"{str(one.status).replace('_', ' ')}: {' '.join(str(one.raw).split())[:160]}"
            broken.append(BrokenCall(len(calls) + len(broken), one.name or "unreadable", why))
    if broken and not calls:
        return Reply({"role": "assistant", "content": text()}, (), broken[0].why)
    message: dict[str, Any] = {"role": "assistant", "content": found.content or ""}
    if found.reasoning_content:
        message["reasoning_content"] = found.reasoning_content
    return Reply(_with_calls(message, calls, broken), tuple(calls), None, tuple(broken))


def _with_calls(message: dict[str, Any], calls: Sequence[Call], broken: Sequence[BrokenCall]) -> dict[str, Any]:
    """The message with all calls in their order, broken ones without arguments."""
    written: list[dict[str, Any]] = [{"name": name, "arguments": dict(x)} for name, x in calls]
    for one in broken:
        written.insert(one.place, {"name": one.name, "arguments": {}})
    if written:
        message["tool_calls"] = [{"type": "function", "function": one} for one in written]
    return message


def reading_of(turns: ChatTurns) -> Reading:
    """How replies of this conversation's tokenizer are read.

    Raises InputError if there are tools, whose calls the chat template writes in a format that is not JSON, while the
    tokenizer has no `response_template`, and the package renderers does not read them.
    """
    tokenizer, prefix = turns.tokenizer, turns.reply_start
    if template := getattr(tokenizer, "response_template", None):
        return Reading(tokenizer, template, prefix, turns.tools)
    template, form = _template(turns, prefix)
    if form is None:
        parse = parser_of(turns, turns.tools)
        if parse is None:
            raise InputError(
                "the chat template writes calls of tools in a format other than JSON: install renderers, which reads "
                "that of most families (pip install 'jaxrl_llm[renderers]'), or set the tokenizer's response_template"
            )
        return Reading(tokenizer, template, prefix, turns.tools, parse=parse)
    return Reading(tokenizer, template, prefix, turns.tools, form, NEXT if turns.format.kind == "plain" else None)


def _template(turns: ChatTurns, prefix: str) -> tuple[dict[str, Any], CallFormat | None]:
    """A response template from what the chat template writes for a call, and the format of calls; None: not JSON."""
    asked, end = [{"role": "user", "content": "x"}], (turns.reply_end or "").strip()
    call = {"type": "function", "id": "call00000", "function": {"name": "look", "arguments": {"text": "at it"}}}
    said = turns.written([*asked, {"role": "assistant", "content": "~"}])
    try:
        called: list[dict[str, Any]] = [*asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
        given = fitted(turns, called)[0]
        text = turns.written(given if "tool_calls" in given[-1] else called)  # in its own format, if it has one
    except InputError:
        text = said
    same = next((i for i, (a, b) in enumerate(zip(text, said, strict=False)) if a != b), min(len(text), len(said)))
    written = text[same:]
    found = _json_call(written)
    unread = found is None and "look" in written and bool(turns.tools)
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
    template = {"defaults": {"role": "assistant"}, "start_anchor": prefix or "\n", "fields": fields}
    return template, None if unread else CallFormat(opened, closed, isinstance(value, list))


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
