"""Replies as messages: what the policy thought and said, and which tools it called.

The format of calls is the tokenizer's `response_template` if it has one, else what its chat template writes for a call
(`data.chat.call_formats`), else that of Hermes, which `tools_text` then explains to the policy.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from jaxrl_llm.data.chat.call_formats import FORMATS, Parse, ReadCalls, as_hermes, format_by_mark, parser_of
from jaxrl_llm.data.chat.lenient import BrokenCall, CallFormat, ReadCall, call_of, read_calls
from jaxrl_llm.data.chat.message_forms import as_written
from jaxrl_llm.data.chat.messages import NO_THOUGHTS, Channels, Message, channels_of, text_of_content
from jaxrl_llm.data.chat.rendering import Rendering
from jaxrl_llm.utils.errors import InputError

NEXT = r"\n+(?:User|System|Result):"  # what begins the next turn in `rendering.DIALECT`

INSTRUCTIONS = """You may call these tools:
<tools>
{tools}
</tools>
To call one, write {example}"""


class Reply(NamedTuple):
    """A reply of the policy."""

    message: Message  # {"role": "assistant", "content": text}, with "reasoning_content" and "tool_calls" if there are
    calls: tuple[ReadCall, ...]
    fault: str | None = None  # why no call could be read, in one line; None if one could, or there are none
    broken: tuple[BrokenCall, ...] = ()  # calls that could not be read, beside others that could
    lenient: int = 0  # how many of the calls are not quite in their format
    tokens: int = 0  # tokens of the reply, where they are known
    prompt_tokens: int = 0  # tokens of the row before it, where they are known
    truncated: bool = False  # whether it reached its limit of tokens


@dataclass(frozen=True, eq=False)
class Reading:
    """How the replies of one tokenizer are read."""

    tokenizer: Any
    template: Mapping[str, Any]  # the `response_template` of transformers
    prefix: str  # what the chat template writes at the beginning of each reply
    tools: tuple[Mapping[str, Any], ...] = ()
    read: ReadCalls | None = None  # what reads calls; None where `template` or `parse` does
    channels: Channels = NO_THOUGHTS  # how thoughts are told, which call nothing
    next_turn: str | None = None
    """A pattern of what begins the next turn, which a model goes on with that was trained on no turns."""
    parse: Parse | None = None  # what reads token ids instead: of the package renderers
    opened: str = ""  # what opens a call, which `template` or `parse` may take for a text where the call is cut off

    def __call__(self, ids: Sequence[int]) -> Reply:
        """Read sampled token ids."""
        text = str(self.tokenizer.decode(list(ids), skip_special_tokens=False))
        return self.text(text) if self.parse is None else self._complete(_of_parsed(self.parse(ids), text), text)

    def text(self, text: str) -> Reply:
        """Read a reply's text, with its special tokens.

        Calls are read leniently (`data.chat.lenient`), one by one. Where none can be read, the whole reply is its
        content, and `fault` says why.
        """
        if self.parse is not None:
            return self(self.tokenizer.encode(text, add_special_tokens=False))
        text = text if self.next_turn is None else re.split(self.next_turn, text, maxsplit=1)[0]
        if self.read is None:
            return self._complete(self._strict(text), text)
        text, thought = self._thought(text)
        found = self.read(text[thought:])
        if found.broken and not found.calls:
            content = re.sub(self.channels.refused, " ", text[thought:])
            before = self._parsed(text[:thought])[0] if thought else None
            return Reply({**(before or {}), "role": "assistant", "content": content}, (), found.broken[0].why)
        said, _ = self._parsed(text[:thought] + found.rest)
        message: dict[str, Any] = {"content": "", **(said or {"content": found.rest}), "role": "assistant"}
        return Reply(_with_calls(message, found.calls, found.broken), found.calls, None, found.broken, found.lenient)

    def _thought(self, text: str) -> tuple[str, int]:
        """The text with what opens its thought, which may be in the prompt, and where the thought ends; 0 for none."""
        opened, closed, before = self.channels.opened, self.channels.closed, self.prefix.rstrip()
        begins = text.lstrip().startswith(opened)
        if not closed or (before.endswith(closed) and not begins):
            return text, 0
        stop = text.find(closed)
        if not begins and (stop >= 0 or before.endswith(opened)):
            text, stop = f"{opened}\n{text}", text.find(closed) + len(opened) + 1 if stop >= 0 else -1
        return text, stop + len(closed) if stop >= 0 else 0

    def _parsed(self, text: str) -> tuple[dict[str, Any] | None, str]:
        """The fields of a reply, or None and why not."""
        from transformers.utils.chat_parsing import parse_response

        try:
            tools: Any = [dict(tool) for tool in self.tools] or None
            return dict(parse_response(text, dict(self.template), prefix=self.prefix, tools=tools)), ""
        except Exception as error:  # the policy may write anything
            return None, " ".join(str(error).split())[:200]

    def _complete(self, reply: Reply, text: str) -> Reply:
        """The reply, with a fault if no call was read though its text opens one after its thought."""
        closed = self.channels.closed
        said = text.rpartition(closed)[2] if closed else text
        if reply.calls or reply.fault or not self.opened or self.opened not in said:
            return reply
        why = f"{self.opened} opens a call, but the call is not complete"
        return Reply({"role": "assistant", "content": text}, (), why)

    def _strict(self, text: str) -> Reply:
        found, wrong = self._parsed(text)
        try:
            if found is None:
                raise ValueError(wrong)
            calls = tuple(call_of(one) for one in found.get("tool_calls") or ())
        except ValueError as error:
            return Reply({"role": "assistant", "content": text}, (), " ".join(str(error).split())[:200])
        return Reply({"content": "", **found, "role": "assistant"}, calls)


def tools_text(tools: Sequence[Mapping[str, Any]], example: str) -> str:
    """What describes the tools and the format of calls to a policy whose chat template does not."""
    return INSTRUCTIONS.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools), example=example)


def example_of(rendering: Rendering, read: ReadCalls | None) -> str:
    """A call as the chat template writes it, else as Hermes does, with what it is. read: as of `calls_of`."""
    function = {"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}
    written = _written_call(rendering, function)
    found = read(written) if written and read else None
    if written is None or found is None or not found.calls:
        return f"a JSON object between tags:\n{as_hermes([function])}"
    return f"as here:\n{written[: found.end].strip()}"


def with_instructions(messages: Sequence[Message], text: str, system: bool = True) -> list[Message]:
    """The messages with a text at the end of the system message, else at the beginning of the first user message."""
    first = messages[0] if messages else {}
    content = text_of_content(first.get("content"))
    if system and first.get("role") == "system":
        return [{**first, "content": f"{content}\n\n{text}"}, *messages[1:]]
    if not system and first.get("role") == "user":
        return [{**first, "content": f"{text}\n\n{content}"}, *messages[1:]]
    return [{"role": "system" if system else "user", "content": text}, *messages]


def _of_parsed(found: Any, text: str) -> Reply:
    """A reply from a `renderers.ParsedResponse`. text: of the whole reply."""
    calls: list[ReadCall] = []
    broken: list[BrokenCall] = []
    for one in found.tool_calls:
        arguments = one.arguments
        if one.status == "ok" and isinstance(one.name, str) and isinstance(arguments, Mapping):
            calls.append(ReadCall(one.name, arguments))
        else:
            why = f"{str(one.status).replace('_', ' ')}: {' '.join(str(one.raw).split())[:160]}"
            broken.append(BrokenCall(len(calls) + len(broken), one.name or "unreadable", why))
    if broken and not calls:
        return Reply({"role": "assistant", "content": text}, (), broken[0].why)
    message: dict[str, Any] = {"role": "assistant", "content": found.content or ""}
    if found.reasoning_content:
        message["reasoning_content"] = found.reasoning_content
    return Reply(_with_calls(message, calls, broken), tuple(calls), None, tuple(broken))


def _with_calls(message: dict[str, Any], calls: Sequence[ReadCall], broken: Sequence[BrokenCall]) -> dict[str, Any]:
    """The message with all calls in their order, broken ones without arguments."""
    written: list[dict[str, Any]] = [{"name": name, "arguments": dict(x)} for name, x in calls]
    for one in broken:
        written.insert(one.place, {"name": one.name, "arguments": {}})
    if written:
        message["tool_calls"] = [{"type": "function", "function": one} for one in written]
    return message


def reading_of(rendering: Rendering, read: ReadCalls | None, stops: Collection[int]) -> Reading:
    """How the replies of a conversation are read.

    read: as of `calls_of`. stops: tokens with which a reply ends. Raises InputError if there are tools, whose calls the
    chat template writes in none of the formats of `call_formats`, while the tokenizer has no `response_template`, and
    the package renderers does not read them.
    """
    tokenizer, prefix, tools = rendering.tokenizer, rendering.reply_start, rendering.tools
    channels = channels_of(rendering.template)
    begun = (_written_call(rendering, _LOOK._asdict()) or "").partition(_LOOK.name)[0].lstrip()
    tag = re.match(r"<[^<>]*>|\[\w+\]|[^{]*", begun)
    opened = tag[0].strip() if tag and tools else ""
    if template := getattr(tokenizer, "response_template", None):
        return Reading(tokenizer, template, prefix, tools, channels=channels, opened=opened)
    end = (rendering.reply_end or "").strip()
    ends = "|".join(re.escape(one) for one in {end, *map(tokenizer.decode, stops)} if one) or "$"
    said = {"close_pattern": rf"(?:{ends})\s*|$", "content": "text"}
    fields = {name: {"content": "text", **one} for name, one in channels.fields.items()}
    fields["content"] = {**fields.get("content", {}), **said}
    template = {"defaults": {"role": "assistant"}, "start_anchor": prefix or "\n", "fields": fields}
    parse = parser_of(rendering, tools) if read is None and tools else None
    if read is None and tools and parse is None:
        raise InputError(
            "the chat template writes calls of tools in a format that is not known: install renderers, which reads "
            "that of some families (pip install 'jaxrl_llm[renderers]'), or set the tokenizer's response_template"
        )
    read = read or format_by_mark(rendering).of(tools)
    next_turn = NEXT if rendering.format.kind == "plain" else None
    return Reading(tokenizer, template, prefix, tools, read, channels, next_turn, parse, opened)


_LOOK = ReadCall("look", {"text": "at it\n2", "count": 3, "exact": True})
_KINDS = {"text": "string", "count": "integer", "exact": "boolean"}
_LOOK_SCHEMA = {"name": "look", "parameters": {"properties": {name: {"type": kind} for name, kind in _KINDS.items()}}}


def calls_of(rendering: Rendering) -> ReadCalls | None:
    """What reads calls as the chat template writes them; None for a format that is not known."""
    written = _written_call(rendering, _LOOK._asdict())
    if written is None:
        return format_by_mark(rendering).of(rendering.tools)
    if found := _json_call(written):
        start, stop, value = found
        closed = written[stop:].strip().removesuffix((rendering.reply_end or "").strip()).strip()
        return partial(read_calls, form=CallFormat(written[:start].strip(), closed, isinstance(value, list)))
    fitting = (one for one in FORMATS if one.read(written, (_LOOK_SCHEMA,)).calls == (_LOOK,))
    return next((one.of(rendering.tools) for one in fitting), None)


def _written_call(rendering: Rendering, function: Mapping[str, Any]) -> str | None:
    """What the chat template writes for a call, from where it differs from a reply; None if it writes none."""
    asked: Message = {"role": "user", "content": "x"}
    call = {"type": "function", "id": "call00000", "function": function}
    called: list[Message] = [asked, {"role": "assistant", "content": "", "tool_calls": [call]}]
    try:
        given = as_written(rendering, called)[0]
        text = rendering.written([*given] if "tool_calls" in given[-1] else called)
        said = rendering.written([asked, {"role": "assistant", "content": "~"}])
    except InputError:
        return None
    same = next((i for i, (a, b) in enumerate(zip(text, said, strict=False)) if a != b), min(len(text), len(said)))
    return text[same:] if function["name"] in text[same:] else None


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
