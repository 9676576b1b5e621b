"""Conversations as text: a tokenizer's chat template, with the date of a run, on messages that it may not lose."""

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, Literal
from weakref import WeakKeyDictionary

from jaxrl_llm.data.chat.inert import control_tokens, encode, guarded, pattern_of
from jaxrl_llm.data.chat.messages import THOUGHTS, Message, text_parts
from jaxrl_llm.utils.errors import InputError, shown
from jaxrl_llm.utils.keywords import settings_class
from jaxrl_llm.utils.settings import check_types

Thoughts = Literal["keep", "as-template"]

DIALECT = (
    "{% for m in messages %}"
    "{{ {'user': 'User', 'system': 'System', 'assistant': 'Assistant', 'tool': 'Result'}.get(m.role, m.role) }}: "
    "{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{{ '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)
"""How conversations are written without a chat template, after the token that the tokenizer begins texts with."""

REPLIES = "assistant reply one", "and a reply of another length: 2."
"""Replies of the synthetic conversations. What follows them must not depend on them."""

SWITCHES = ("enable_thinking", "thinking", "reasoning_effort")
"""Variables of chat templates that say whether the policy thinks, and how much."""
_TEMPLATE_OPTIONS = (*SWITCHES, "add_generation_prompt", "documents")
_takes_parts: WeakKeyDictionary[Any, dict[str, bool]] = WeakKeyDictionary()  # by template
_CODES = ("%-d", "%-m", *(f"%{code}" for code in "dmYyBbAajeFxDcHMSIpfZzUWuwGVT"), "%%")


@lru_cache(maxsize=1)
def today() -> str:
    """The date on which this process first asked for it, as 2031-01-31: prompts stay the same over midnight."""
    return datetime.date.today().isoformat()


@settings_class(lambda name: f"PromptFormat(options={{{name!r}: ...}})" if name in _TEMPLATE_OPTIONS else "")
@dataclass(frozen=True)
class PromptFormat:
    """How prompts become token ids."""

    kind: Literal["chat", "plain", "rendered"] = "chat"
    """chat: messages through the chat template, of a tokenizer that has one; a text is a user's message. plain: a text
    as it is. rendered: a text that a chat template wrote, with its control tokens."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further variables of the chat template, such as {"enable_thinking": False}."""
    thoughts: Thoughts = "keep"
    """Thoughts of earlier replies that the chat template leaves out: kept as it writes those of the last reply, or left
    out as the template does."""
    date: str | None = None
    """What the chat template takes for today, as 2031-01-31; None: when this process began to render."""

    def __post_init__(self) -> None:
        check_types(self, "a prompt format's ")
        try:
            datetime.date.fromisoformat(self.date or "2000-01-01")
        except ValueError:
            raise InputError(f"date is {shown(self.date)}, but must be a day, such as 2031-01-31") from None


@dataclass(frozen=True, eq=False)
class Rendering:
    """How one tokenizer writes conversations."""

    tokenizer: Any  # of transformers
    tools: tuple[Mapping[str, Any], ...] = ()
    """JSON schemas of the tools that the policy may call, such as of `transformers.utils.get_json_schema`."""
    format: PromptFormat = field(default_factory=PromptFormat)
    """Of kind "chat" or "plain", which is `DIALECT` even where there is a chat template."""

    @cached_property
    def template(self) -> str:
        """The chat template's text. Of several, the one for tools where there are some. InputError for none."""
        own = getattr(self.tokenizer, "chat_template", None)
        if self.format.kind == "plain":
            first = next(iter(self.tokenizer("x")["input_ids"]), None)
            begins = first is not None and first == getattr(self.tokenizer, "bos_token_id", None)
            return ("{{ bos_token }}" if begins else "") + DIALECT
        if not own:
            raise InputError("conversations need a chat template, but this tokenizer has none: set chat_template")
        if isinstance(own, str):
            return own
        named = {**own} if isinstance(own, Mapping) else {one["name"]: one["template"] for one in own}
        found = named.get("tool_use" if self.tools else "default", named.get("default"))
        if found is None:
            raise InputError(f"the tokenizer has the chat templates {', '.join(named)}, but none called default")
        return str(found)

    @cached_property
    def control(self) -> tuple[str, ...]:
        """Texts that are control tokens: what users, tools and environments say never holds them."""
        return control_tokens(self.tokenizer, self.template)

    def render(self, messages: Sequence[Message], reply: bool = True) -> str:
        """The text of messages as they are; reply: with the beginning of the next reply. InputError if that fails.

        Contents that are texts become a part each where the template takes parts alone.
        """
        if self._takes_parts_alone:
            messages = [
                {**message, "content": text_parts(message.get("content") or "")}
                if isinstance(message.get("content", ""), str)
                else message
                for message in messages
            ]
        return self._rendered(messages, reply)

    @property
    def _takes_parts_alone(self) -> bool:
        known = _takes_parts.setdefault(self.tokenizer, {})
        text = "a question"
        if self.template not in known:
            plain, parts = ([{"role": "user", "content": content}] for content in (text, text_parts(text)))
            known[self.template] = not _gives(self._rendered, plain, text) and _gives(self._rendered, parts, text)
        return known[self.template]

    def _rendered(self, messages: Sequence[Message], reply: bool = True) -> str:
        schemas = [dict(tool) for tool in guarded(self.tools, self.control)] if self.tools else None
        try:
            text = self.tokenizer.apply_chat_template(
                [{self._keys.get(key, key): one for key, one in x.items() if one is not None} for x in messages],
                tools=schemas, add_generation_prompt=reply, tokenize=False,
                chat_template=dated(self.template, self.format.date or today()),
                **guarded(dict(self.format.options), self.control),
            )  # fmt: skip
        except Exception as error:  # a chat template is a program and can raise anything
            roles = ", ".join(str(message.get("role")) for message in messages[:20])
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            raise InputError(f"the chat template rejects messages with the roles {roles}: {reason}") from None
        assert isinstance(text, str)
        return text

    @cached_property
    def _keys(self) -> dict[str, str]:
        """Other names of entries of messages, as the template has them: of thoughts."""
        names = [name for name in THOUGHTS if re.search(rf"""['".]{name}\b""", self.template)]
        return {THOUGHTS[0]: names[0]} if names else {}

    def encode(self, text: str) -> list[int]:
        """The token ids of rendered text, which contains the control tokens that belong there."""
        return encode(self.tokenizer, text, self.control)

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """What the texts of messages depend on, besides the messages."""
        return self.template, repr(self.tools), repr(self.format)

    def check_options(self, options: Mapping[str, Any]) -> None:
        """InputError for options that the chat template does not read: they would change nothing."""
        read = {name for name in (*options, *SWITCHES) if re.search(rf"\b{re.escape(name)}\b", self.template)}
        if unread := [name for name in options if name not in read]:
            known = [name for name in SWITCHES if name in read]
            raise InputError(
                f"the chat template does not read {', '.join(unread)}: leave it out"
                + (f", or give {' or '.join(known)}, which it reads" if known else "")
            )

    @cached_property
    def shows_tools(self) -> bool:
        """Whether the chat template describes the tools to the policy."""
        name = "a_tool_of_no_other_name"
        tool = {"type": "function", "function": {"name": name, "description": name, "parameters": {}}}
        own = Rendering(self.tokenizer, (tool,), self.format)
        return _gives(own.render, [{"role": "user", "content": "x"}], name)

    @cached_property
    def takes_system(self) -> bool:
        """Whether the chat template writes system messages."""
        text = "a system message of no other text"
        return _gives(self.render, [{"role": "system", "content": text}, {"role": "user", "content": "x"}], text)

    @cached_property
    def _turn(self) -> tuple[str, str]:
        """What the template writes for the beginning of a reply, and what it writes at the end instead of that."""
        asked = [{"role": "user", "content": "a question"}]
        begun, ended = self.render(asked), self.render(asked, reply=False)
        pairs = enumerate(zip(begun, ended, strict=False))
        same = next((place for place, (a, b) in pairs if a != b), min(len(begun), len(ended)))
        for text in (begun, ended):  # not in the middle of a control token
            found = pattern_of(self.control).finditer(text)
            same = min([same, *(one.start() for one in found if one.start() < same < one.end())])
        return begun[same:], ended[same:]

    @property
    def reply_start(self) -> str:
        """What the template writes before a reply; empty for templates that mark the end of questions alone."""
        return self._turn[0]

    @cached_property
    def reply_end(self) -> str | None:
        """What ends a reply, such as "<|im_end|>\\n"; None if it depends on the reply."""
        ends = set()
        for reply in REPLIES:
            text = self.written([{"role": "user", "content": "x"}, {"role": "assistant", "content": reply}])
            ends.add(text.rpartition(reply)[2] if reply in text else None)
        return ends.pop() if len(ends) == 1 else None

    def asked(self, messages: Sequence[Message]) -> str:
        """The text of messages and the beginning of the next reply.

        Where a reply both says something and calls tools, some templates close its turn after the results, and begin no
        other: the policy would speak outside of any turn.
        """
        text = self.render(messages)
        if not self.reply_start or messages[-1].get("role") != "tool" or text != self.render(messages, reply=False):
            return text
        said = "a question"
        closing = self.render([{"role": "user", "content": said}], reply=False).rpartition(said)[2]
        return text + self.reply_start if closing and text.endswith(closing) else text

    def written(self, messages: Sequence[Message]) -> str:
        """The text of messages without the beginning of a reply, and without what ends a whole conversation."""
        return self.render(messages, reply=False).removesuffix(self._turn[1])


def _gives(render: Callable[[Sequence[Message]], str], messages: Sequence[Message], text: str) -> bool:
    """Whether messages are rendered with a text; not where the template rejects them."""
    try:
        return text in render(messages)
    except InputError:
        return False


@lru_cache(maxsize=16)
def dated(template: str, date: str) -> str:
    """A chat template whose `strftime_now` gives this date, at midnight.

    >>> dated("no date", "2031-01-31")
    'no date'
    """
    if "strftime_now" not in template:
        return template
    day = datetime.datetime.fromisoformat(date)
    codes = "".join(f" | replace({code!r}, {day.strftime(code)!r})" for code in _CODES)
    first = len(template) - len(template.lstrip())  # in front of the first tag: what is stripped there stays so
    macro = "{% macro strftime_now(format) %}{{ format" + codes + " }}{% endmacro %}{{ '' }}"
    return template[:first] + macro + template[first:]
