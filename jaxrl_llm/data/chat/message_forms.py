"""Messages that a chat template may not lose: what it drops is found with markers, and mapped or refused.

A conversation is first rendered with a marker in place of each text: contents, parts of contents, thoughts, the
calls of tools, and the names of users and replies. Where one is missing, the messages are given in another form that
the template writes: parts as one text, `developer` as `system`, results of tools as a user's, calls and thoughts within
the content, names before it.
What is found in no form is refused. The form is remembered for conversations of the same shape.
"""

import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from jaxrl_llm.data.chat.inert import guarded
from jaxrl_llm.data.chat.message_changes import MOVES, NONCE, Form, Move, applied, as_user
from jaxrl_llm.data.chat.messages import CLOSED, OPENED, Message, plain_message
from jaxrl_llm.data.chat.rendering import Rendering
from jaxrl_llm.utils.errors import InputError, shown

_known: WeakKeyDictionary[Any, dict[Any, tuple[Form, ...] | str]] = WeakKeyDictionary()


class _Mark(NamedTuple):
    """A text of a conversation that must be found in what the template writes."""

    message: int
    what: str  # "content", "thought", "call" or "name"
    text: str
    is_part: bool = False  # of a content of several
    spaced: bool = False  # whether there is white space between it and the part before


def as_written(rendering: Rendering, messages: Sequence[Message]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Messages in the form in which the template writes all of them, control tokens but those of replies guarded.

    Also returns texts by the placeholders for which they are to be put into what the template writes. Raises InputError
    for what the template drops in every form.
    """
    plain = [plain_message(message) for message in messages]
    for number, message in enumerate(plain, start=1):
        if not re.fullmatch(r"\w[\w .-]*", str(message.get("role"))):
            raise InputError(f"message {number}: its role is {shown(message.get('role'))}, but must be a word")
    shape, marks = _shape(plain)
    forms = _forms(rendering, shape, marks)
    safe = [
        message if message["role"] == "assistant" else {**guarded(message, rendering.control), "role": message["role"]}
        for message in plain
    ]
    return applied(rendering, safe, forms)


def conversation_text(rendering: Rendering, messages: Sequence[Message]) -> str:
    """What the template writes of a conversation up to where the policy speaks, for `Rendering.encode`.

    A last message of the assistant is continued. InputError for messages that the template drops or rejects, and for a
    last message that calls tools.
    """
    continued = bool(messages) and messages[-1].get("role") == "assistant"
    if continued and messages[-1].get("tool_calls"):
        raise InputError(
            f"message {len(messages)} calls tools that nothing answers: give their results, or leave it out"
        )
    given, instead = as_written(rendering, messages)
    if not continued:
        return with_texts(rendering.asked(given), instead)
    content: Any = given[-1].get("content") or ""
    end = f"{NONCE}end"
    parts = isinstance(content, list)
    said = content[-1]["text"] if parts else str(content)
    longer: Any = [*content[:-1], {**content[-1], "text": said + end}] if parts else said + end
    begun, found, _ = rendering.written([*given[:-1], {**given[-1], "content": longer}]).rpartition(end)
    if not found:
        raise InputError(f"message {len(messages)}: the chat template drops the end of the last reply, to be continued")
    if said.startswith(OPENED) and CLOSED not in said:  # a thought that goes on: no empty one before it
        start = rendering.render(given[:-1])
        begun = start.removesuffix(start[start.rfind(OPENED) :] if start.rstrip().endswith(OPENED) else "") + said
    return with_texts(begun, instead)


def lost_thoughts(rendering: Rendering, messages: Sequence[Message]) -> int:
    """How many thoughts of replies the template leaves out of a conversation, whose other texts it writes."""
    shape, marks = _shape([plain_message(message) for message in messages])
    given, instead = applied(rendering, shape, _forms(rendering, shape, marks))
    text = with_texts(rendering.written(given), instead)
    return sum(one.what == "thought" and one.text not in text for one in marks)


def with_texts(text: str, instead: Mapping[str, str]) -> str:
    """A text with other texts for their placeholders."""
    for placeholder, own in instead.items():
        text = text.replace(placeholder, own)
    return text


def _shape(messages: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[_Mark]]:
    """The conversation with markers as its texts, and the markers."""
    marks: list[_Mark] = []
    ids: dict[str, str] = {}

    def mark(place: int, what: str, text: str) -> str:
        if not text.strip():
            return text
        marks.append(_Mark(place, what, f"{NONCE}m{len(marks)}m"))
        return marks[-1].text

    def marked_parts(place: int, texts: Sequence[str]) -> Iterator[dict[str, str]]:
        before = "x"
        for text in texts:
            own = mark(place, "content", text)
            if text.strip():
                marks[-1] = marks[-1]._replace(is_part=True, spaced=before[-1:].isspace() or text[:1].isspace())
                own = f"{' ' * text[0].isspace()}{own}{' ' * text[-1].isspace()}"
            before = text or before
            yield {"type": "text", "text": own}

    shape = []
    for place, message in enumerate(messages):
        out: dict[str, Any] = {"role": message["role"]}
        if "name" in message:  # the call that a tool answers names it
            tool = message["role"] in ("tool", "function")
            out["name"] = "name" if tool else mark(place, "name", str(message["name"]))
        if "tool_call_id" in message:
            out["tool_call_id"] = ids.setdefault(str(message["tool_call_id"]), f"call{len(ids):05d}")
        if "reasoning_content" in message:
            out["reasoning_content"] = mark(place, "thought", str(message["reasoning_content"]))
        content = message.get("content")
        if isinstance(content, str) and message["role"] == "assistant" and CLOSED in content:
            thought, _, said = content.rpartition(CLOSED)
            thought = mark(place, "thought", thought.replace(OPENED, ""))
            out["content"] = f"{OPENED}\n{thought}\n{CLOSED}\n\n{mark(place, 'content', said)}"
        elif isinstance(content, str):
            out["content"] = mark(place, "content", content)
        elif content is not None:
            out["content"] = list(marked_parts(place, [part["text"] for part in content]))
        if "tool_calls" in message:
            out["tool_calls"] = []
            for call in message["tool_calls"]:
                own = call["function"]
                shown_call: dict[str, Any] = {"name": mark(place, "call", str(own["name"]))}
                if isinstance(own["arguments"], Mapping):
                    shown_call["arguments"] = {"text": mark(place, "call", "x")} if own["arguments"] else {}
                else:
                    shown_call["arguments"] = mark(place, "call", str(own["arguments"]))
                identity = {"id": ids.setdefault(str(call["id"]), f"call{len(ids):05d}")} if "id" in call else {}
                out["tool_calls"].append({"type": "function", **identity, "function": shown_call})
        shape.append(out)
    return shape, marks


def _forms(rendering: Rendering, shape: list[dict[str, Any]], marks: list[_Mark]) -> tuple[Form, ...]:
    """The form of each message in which every marker is found, once. InputError if there is none."""
    known = _known.setdefault(rendering.tokenizer, {})
    key = *rendering.key, repr(shape)
    if key not in known:
        try:
            known[key] = _found_forms(rendering, shape, marks)
        except InputError as error:
            known[key] = str(error)
    found = known[key]
    if isinstance(found, str):
        raise InputError(found)
    return found


def _found_forms(rendering: Rendering, shape: list[dict[str, Any]], marks: list[_Mark]) -> tuple[Form, ...]:
    forms: list[Form] = [Form()] * len(shape)

    def lost(tried: Sequence[Form]) -> list[_Mark] | InputError:
        try:
            given, instead = applied(rendering, shape, tried)
            ends = shape[-1]["role"] == "assistant"
            text = with_texts(rendering.written(given) if ends else rendering.render(given), instead)
        except InputError as error:
            return error
        gone = [one for one in marks if not _is_there(one, text)]
        return [one for one in gone if not (one.what == "thought" and rendering.format.thoughts == "as-template")]

    def changed(forms: Sequence[Form], moves: Sequence[Move], places: Callable[[str], Collection[int]]) -> list[Form]:
        tried = list(forms)
        for what, change in moves:
            for place in places(what):
                tried[place] = change(tried[place], shape[place]) or tried[place]
        return tried

    template = rendering.template

    def everywhere(moves: Collection[Move]) -> Iterator[list[Form]]:
        for some in itertools.chain.from_iterable(itertools.combinations(moves, count) for count in range(1, 5)):
            yield changed([Form()] * len(shape), some, lambda what: range(len(shape)))

    missing = lost(forms)
    if isinstance(missing, InputError):  # it does not say of which message; what it says of tools counts
        for tried in everywhere([move for move in MOVES if move[1] is not as_user or "tool" not in template]):
            if not isinstance(now := lost(tried), InputError):
                forms, missing = tried, now
                break
    for move in MOVES * 2:
        if not missing or isinstance(missing, InputError):
            break
        concerned = {what: {one.message for one in missing if one.what == what} for what, _ in MOVES}
        tried = changed(forms, [move], concerned.__getitem__)
        now = lost(tried) if tried != forms else missing
        if not isinstance(now, InputError) and len(now) < len(missing):
            forms, missing = tried, now
    if missing and not isinstance(missing, InputError):  # several changes may be needed together
        forms = next((tried for tried in everywhere(MOVES) if lost(tried) == []), forms)
        missing = lost(forms)
    if isinstance(missing, InputError):
        raise missing
    if missing:
        one, role = missing[0], shape[missing[0].message]["role"]
        remedy = {
            "thought": "give earlier_thoughts as-template, which leaves it out",
            "call": "write the call into the content",
        }.get(one.what, "give it another role, or write the prompt yourself: prompt_format rendered")
        raise InputError(
            f"message {one.message + 1}: the chat template drops or repeats the {one.what} of the role {role}: {remedy}"
        )
    return tuple(forms)


def _is_there(mark: _Mark, text: str) -> bool:
    """Whether a text is where it belongs: once, but names of tools, which results have too."""
    if mark.what == "call":  # arguments that are written as Python writes them were to be given as text
        return mark.text in text and repr({"text": mark.text}) not in text
    if mark.is_part and re.search(rf"""(["'])text\1: ?(["']) ?{mark.text} ?\2""", text):
        return False  # as JSON, or as Python writes it
    return text.count(mark.text) == 1 and (not mark.spaced or re.search(rf"\s{mark.text}", text) is not None)
