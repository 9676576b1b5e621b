"""Messages of a conversation, and what they say."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.data.chat.calls import Message
from jaxrl_llm.data.chat.encode import is_conversation, parsed_json
from jaxrl_llm.data.chat.messages import text_of_content
from jaxrl_llm.rollouts.program_host import FAILED
from jaxrl_llm.utils.errors import InputError, shown


def merged(messages: Sequence[Message]) -> list[Message]:
    """The messages, where those of a user that follow each other are one, as many chat templates want it."""
    out: list[Message] = []
    for message in messages:
        if out and out[-1]["role"] == message["role"] == "user":
            out[-1] = {
                **out[-1],
                "content": f"{text_of_content(out[-1]['content'])}\n\n{text_of_content(message['content'])}",
            }
        else:
            out.append(dict(message))
    return out


def lines_of(messages: Sequence[Message]) -> list[str]:
    """Messages as texts, "ROLE: TEXT" each.

    >>> lines_of([{"role": "user", "content": "Go."}])
    ['user: Go.']
    """
    return [f"{one['role']}: {text_of_content(one.get('content'))}" for one in messages]


def messages_after(said: Sequence[Message], whole: Sequence[Message]) -> list[Message] | None:
    """What a whole conversation has after what was said; None where it does not begin so, or has nothing after it.

    Ids of calls and thoughts do not count, nor blanks around a text.

    >>> whole = [{"role": "user", "content": " a"}, {"role": "tool", "content": "b"}]
    >>> messages_after([{"role": "user", "content": "a"}], whole)
    [{'role': 'tool', 'content': 'b'}]
    """
    begins = len(whole) > len(said) and same_messages(said, whole[: len(said)])
    return list(whole[len(said) :]) if begins else None


def same_messages(one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Whether two conversations say the same, see `messages_after`."""
    return len(one) == len(other) and all(_essence(a) == _essence(b) for a, b in zip(one, other, strict=True))


def _essence(message: Message) -> tuple[str, str, list[tuple[str, Any]]]:
    calls = [call.get("function", call) for call in message.get("tool_calls") or ()]
    read = [(str(call.get("name")), parsed_json(call.get("arguments"))) for call in calls]
    return str(message["role"]), text_of_content(message.get("content")).strip(), read


def with_guidance(messages: Sequence[Message], text: str) -> list[Message]:
    """The messages with a text at the beginning of the last one, or after it where that is not a user's.

    >>> with_guidance([{"role": "user", "content": "You see a door."}], "Open it.")
    [{'role': 'user', 'content': 'Open it.\\n\\nYou see a door.'}]
    """
    *others, last = messages
    if last["role"] == "user":
        return [*others, {**last, "content": f"{text}\n\n{text_of_content(last['content'])}"}]
    return [*messages, {"role": "user", "content": text}]


def messages_of(row: Mapping[str, Any], system: str | None = None) -> list[Message]:
    """The messages of a row's prompt, after the system's. InputError for a prompt that is no text and no messages."""
    prompt: Any = row.get("prompt")
    if not isinstance(prompt, str) and not is_conversation(prompt):
        raise InputError("an agent's prompts are texts or messages, which its environment's come after")
    texts: Any = [{"role": "user", "content": prompt}] * bool(prompt)
    asked: list[Message] = texts if isinstance(prompt, str) else [*map(dict, prompt)]
    has_own = bool(asked) and asked[0].get("role") == "system"
    return asked if system is None or has_own else [{"role": "system", "content": system}, *asked]


def conversation_of(found: Any) -> list[Message]:
    """What a function of compaction returned. InputError if it failed, and for what is no conversation."""
    if isinstance(found, dict) and set(found) == {FAILED}:
        raise InputError(f"compact failed: {found[FAILED]}")
    if not is_conversation(found) or found[-1]["role"] == "assistant":
        raise InputError(
            f"compact returns {shown(found)}, but must return messages, the last of which is to be answered"
        )
    return list(found)
