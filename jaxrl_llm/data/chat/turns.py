"""Turns of a conversation as token ids: what the policy sampled stays as it is, and the next turn is appended to it.

A chat template renders whole conversations. What it puts between the end of a reply and the beginning of the next is
found from a synthetic conversation, so that nothing that was sampled is decoded, rendered and encoded again. Where the
template does not append, such as one that moves the tools to the last user message, `ChatTurns.bridge` returns None.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property

from jaxrl_llm.data.chat.call_formats import ReadCalls
from jaxrl_llm.data.chat.calls import Message, Reading, calls_of, example_of, reading_of, tools_text, with_instructions
from jaxrl_llm.data.chat.inert import guarded
from jaxrl_llm.data.chat.message_forms import as_written, conversation_text, with_texts
from jaxrl_llm.data.chat.messages import plain_message, text_of_content
from jaxrl_llm.data.chat.rendering import REPLIES, Rendering
from jaxrl_llm.utils.errors import InputError

_TOLD = "[description of the tools]"
_SAID: list[Message] = [{"role": "assistant", "content": reply} for reply in REPLIES]


@dataclass(frozen=True, eq=False)
class ChatTurns(Rendering):
    """How the conversations of one tokenizer begin and go on; in `rendering.DIALECT` where it has no chat template.

    >>> turns = ChatTurns(tokenizer)                                                        # doctest: +SKIP
    >>> ids = turns.begin([{"role": "user", "content": "2 + 2?"}])                          # doctest: +SKIP
    >>> more = turns.bridge([{"role": "user", "content": "And 3?"}], last=sampled[-1])      # doctest: +SKIP
    """

    def __post_init__(self) -> None:
        if not getattr(self.tokenizer, "chat_template", None):
            object.__setattr__(self, "format", replace(self.format, kind="plain"))

    @cached_property
    def reading(self) -> Reading:
        """How replies are read; see `jaxrl_llm.data.chat.calls`."""
        return reading_of(self, self.calls, self.stops)

    @cached_property
    def calls(self) -> ReadCalls | None:
        """What reads calls of tools; None where only the package renderers or a `response_template` may."""
        return calls_of(self)

    def begin(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation up to where the policy replies, or goes on with its own last message.

        If the chat template does not describe tools, a system message does, or the first user message where the
        template writes no system messages, with a call as the template writes it, else in the format of Hermes.
        """
        if not self.tools or self.shows_tools:
            return self.encode(conversation_text(self, messages))
        described = with_instructions(messages, _TOLD, self.takes_system)
        text = tools_text(guarded(self.tools, self.control), example_of(self, self.calls))
        return self.encode(with_texts(conversation_text(self, described), {_TOLD: text}))

    @cached_property
    def has_tool_role(self) -> bool:
        """Whether messages of the role "tool" can follow a reply that calls tools. Else they are a user message."""
        return self._delta([{"role": "tool", "content": "found 41"}]) is not None

    def bridge(self, messages: Sequence[Message], last: int | None) -> list[int] | None:
        """The token ids between a sampled reply and the next one, which answers `messages`.

        messages: what the conversation got since the reply, such as one user message, or the results of the tools that
        it called, in order. last: id of the reply's last sampled token. The end of the reply is completed if the token
        is not that end, as where the reply was cut.

        Returns None where the chat template does not append such messages to the conversation: a new row then begins.
        Raises InputError for no messages.
        """
        if not messages:
            raise InputError("the next turn has no messages: an environment that is not done gives an observation")
        messages = self._in_form(messages)
        delta = self._delta(messages) if self.has_tool_role else None
        for role in ("tool", "user"):
            if delta is None and any(message.get("role") == "tool" for message in messages):
                delta = self._delta(_joined(messages, role)) if self.has_tool_role or role == "user" else None
        delta = self._delta(messages) if delta is None else delta
        if delta is None:
            return None
        token = "" if last is None else self.tokenizer.decode([last], skip_special_tokens=False)
        if last in self._special and delta.lstrip().startswith(token):
            delta = delta.lstrip()[len(token) :]
        elif last is not None and last in self.stops:
            return None  # it ended in another way than the template writes
        return self.encode(delta)

    def _in_form(self, messages: Sequence[Message]) -> list[Message]:
        """The messages as texts, guarded, in roles that the template writes. InputError for what it drops."""
        plain = [plain_message(message) for message in messages]
        if not any(message["role"] in ("tool", "function") for message in plain):
            before = [{"role": "user", "content": "x"}, {"role": "assistant", "content": REPLIES[0]}]
            with suppress(InputError):  # it may write them after other messages
                return [*as_written(self, [*before, *plain])[0][2:]]
        roles = {"function": "tool", "developer": "system"}
        return [
            {
                **guarded(one, self.control), "role": roles.get(one["role"], one["role"]),
                "content": guarded(text_of_content(one.get("content")), self.control),
            }
            for one in plain
        ]  # fmt: skip

    @cached_property
    def ends(self) -> tuple[frozenset[int], frozenset[int]]:
        """Special tokens with which a reply may end, and a reply that calls tools.

        They are what the template writes after it: where nothing ends a reply, the beginning of the next turn.
        """
        asked, answered = (self._delta([{"role": role, "content": "found 41"}]) for role in ("user", "tool"))
        end, user, tool = (self._special & {*self.encode(text or "")[:1]} for text in (self.reply_end, asked, answered))
        return end | user, tool

    @cached_property
    def stops(self) -> frozenset[int]:
        """Tokens with which a reply ends: the tokenizer's end of text, and those of `ends`."""
        return frozenset.union(*self.ends) | ({self.tokenizer.eos_token_id} & self._special)

    @cached_property
    def _special(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder
        return frozenset([*self.tokenizer.all_special_ids, *(number for number, one in added.items() if one.special)])

    def _delta(self, messages: Sequence[Message]) -> str | None:
        """What the template writes from a reply, without its end, to the beginning of the next; None if not proved."""
        calls = sum(message.get("role") == "tool" for message in messages)
        if calls and calls < len(messages) and any(message.get("role") == "tool" for message in messages[calls:]):
            return None  # results after another message answer no call
        numbered = [
            {**message, "tool_call_id": f"call{number:05d}"} if message.get("role") == "tool" else message
            for number, message in enumerate(messages)
        ]
        names = [str(message.get("name") or "look") for message in messages[:calls]]
        delta = self._after([_called(names, reply) for reply in REPLIES] if calls else _SAID, numbered)
        if delta is None and calls and "tool" in self.template:
            delta = self._after(_SAID, numbered)  # it writes results, but no calls
        contents = [text_of_content(message.get("content")).strip() for message in messages]
        found = delta or ""  # each of them as it is, or as JSON
        there = all(text in found or json.dumps(text, ensure_ascii=False)[1:-1] in found for text in contents)
        return delta if there else None

    def _after(self, replies: Sequence[Message], messages: Sequence[Message]) -> str | None:
        """What the template writes after any of these replies; None if that depends on the reply."""
        found: set[str | None] = set()
        for said, reply in zip(REPLIES, replies, strict=True):
            asked = [{"role": "user", "content": "x"}]
            try:
                before = as_written(self, [*asked, reply])[0]
                if "tool_calls" in reply and "tool_calls" not in before[-1]:
                    before = [*asked, dict(reply)]  # the template writes no calls
                whole, written = self.asked([*before, *messages]), self.written([*before, *messages])
                alone, question = self.written(before), self.written(asked)
            except InputError:
                return None
            if not (whole.startswith(question) and whole.startswith(written) and said in whole and said in alone):
                return None
            closing, after = alone.rpartition(said)[2], whole.rpartition(said)[2]
            end = self._end_of_calls(alone[len(question) :]) if "tool_calls" in reply else closing
            own = closing.removesuffix(end)  # what the policy writes of its call
            # A template may end the last reply otherwise than an earlier one: what follows an earlier one counts.
            another = end.strip() in self.control and after[len(own) :].startswith(self.control)
            appends = closing.endswith(end) and after.startswith(own if another else closing)
            found.add(after[len(own) :] if appends else None)
        return found.pop() if len(found) == 1 else None

    def _end_of_calls(self, reply: str) -> str:
        """What the template writes after the calls of a reply."""
        text = reply.removeprefix(self.reply_start)
        found = self.calls(text) if self.calls else None
        return text[found.end :] if found and found.calls else self.reply_end or ""


def _called(names: Sequence[str], reply: str) -> Message:
    calls = [  # some templates insist on identities of nine letters and digits
        {"type": "function", "id": f"call{n:05d}", "function": {"name": name, "arguments": {"text": reply}}}
        for n, name in enumerate(names)
    ]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def _joined(messages: Sequence[Message], role: str) -> list[Message]:
    """The messages with the results of tools as one message of this role."""
    results = [text_of_content(message["content"]) for message in messages if message.get("role") == "tool"]
    others = [message for message in messages if message.get("role") != "tool"]
    return [{"role": role, "content": "\n".join(results)}, *others]
