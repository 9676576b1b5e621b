"""Calls of tools that are no JSON objects: patterns of a format's parts, and functions that read the arguments.

A format is a `CallSyntax`. Values are typed by the tool's schema where the format does not say what they are (XML), and
are what is written where it does (JSON, Python, the notation of Gemma).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

from jaxrl_llm.data.chat.lenient import BrokenCall, Calls, ReadCall, read_lenient_json
from jaxrl_llm.utils.errors import shown

T = TypeVar("T")
Properties = Mapping[str, Any]  # JSON schemas of a tool's arguments by their names
ReadArguments = Callable[[str, int, Properties], tuple[dict[str, Any], int]]
"""(text, where the arguments begin, their schemas) -> the arguments, and where they end. ValueError for none."""


class CallSyntax(NamedTuple):
    """How a format writes calls: patterns of what is around them, in their order, and what reads the arguments.

    A reply is searched for `opened`; then follow calls, each with a `head` and an `ended`, and `closed`.
    """

    opened: str
    head: str  # up to where the arguments begin, with the group "name"
    arguments: ReadArguments
    ended: str
    closed: str = ""


def read_syntax(text: str, syntax: CallSyntax, tools: Sequence[Mapping[str, Any]] = ()) -> Calls:
    """The calls in a reply's text, without what ends it.

    A call that cannot be read takes no other with it. One that is not ended as it should be counts as lenient.
    """
    calls: list[ReadCall] = []
    broken: list[BrokenCall] = []
    rest: list[str] = []
    done = lenient = 0
    opened, head, ended, closed = (re.compile(one, re.DOTALL) for one in (*syntax[:2], *syntax[3:]))

    def skip(end: re.Pattern[str], start: int) -> int:
        """Where the end of what cannot be read is, before another block of calls."""
        following = opened.search(text, start)
        limit = following.start() if following else len(text)
        return found.start() if (found := end.search(text, start, limit)) else limit

    while begun := opened.search(text, done):
        rest.append(text[done : begun.start()])
        done, before, complete = begun.end(), (len(calls), len(broken)), True
        while call := head.match(text, done):
            try:
                arguments, done = syntax.arguments(text, call.end(), _properties(tools, call["name"]))
                calls.append(ReadCall(call["name"], arguments))
            except (ValueError, RecursionError) as error:
                why = " ".join(str(error).split())[:200]
                broken.append(BrokenCall(len(calls) + len(broken), call["name"], why))
                done = skip(ended, call.end())
            end = ended.match(text, done)
            done, complete = (end.end(), complete) if end else (done, False)
        if before == (len(calls), len(broken)):
            why = f"no call follows {begun[0].strip()}"
            broken.append(BrokenCall(len(calls) + len(broken), "unreadable", why))
            done = skip(closed, max(done, begun.start() + 1))
        end = closed.match(text, done)
        done, complete = (end.end(), complete) if end else (done, False)
        lenient += (len(calls) - before[0]) * (not complete)
    return Calls(tuple(calls), tuple(broken), "".join([*rest, text[done:]]), lenient, done)


def json_arguments(text: str, start: int, properties: Properties) -> tuple[dict[str, Any], int]:
    """Arguments as a JSON object, with raw line breaks and invalid escapes in strings."""
    value, stop, _ = read_lenient_json(text, start)
    if not isinstance(value, dict):
        raise ValueError(f"the arguments are {shown(value)}, but must be a JSON object")
    return value, stop


def tagged_arguments(pattern: str) -> ReadArguments:
    """What reads arguments as names and raw values in tags.

    pattern: of one argument, with the groups "name" and "value". After the last, a closing tag says that no other
    follows: a call that is cut off has not all of its arguments.
    """
    one, closing = re.compile(pattern, re.DOTALL), re.compile(r"\s*</")

    def read(text: str, start: int, properties: Properties) -> tuple[dict[str, Any], int]:
        found: dict[str, Any] = {}
        while argument := one.match(text, start):
            name = argument["name"]
            found[name] = typed(argument["value"], properties.get(name, {}), name)
            start = argument.end()
        if closing.match(text, start) is None:
            following = shown(text[start : start + 40].strip())
            raise ValueError(f"an argument or a closing tag must follow, but there is {following}")
        return found, start

    return read


def named_arguments(text: str, start: int, properties: Properties) -> tuple[dict[str, Any], int]:
    """Arguments as Python writes them, `NAME=VALUE, ...`, up to the closing parenthesis; values may be JSON, too."""
    found, stop = _items(text, start, ")", partial(_entry, mark="="))
    return dict(found), stop


def braced_arguments(text: str, start: int, properties: Properties) -> tuple[dict[str, Any], int]:
    """Arguments as `NAME:VALUE,...` up to the closing brace, with values as of `read_value`."""
    found, stop = _items(text, start, "}", _entry)
    return dict(found), stop


def typed(raw: str, schema: Mapping[str, Any], name: str = "it") -> Any:
    """A raw value as the type that a JSON schema gives it; without a type what JSON or Python reads, else the text.

    ValueError for a value that is none of the schema's types.

    >>> typed("42", {"type": "integer"}), typed("42", {"type": "string"}), typed("True", {"type": "boolean"})
    (42, '42', True)
    """
    kinds = _kinds(schema)
    if kinds == ["string"]:
        return raw
    try:
        value, stop = read_value(raw, 0)
        known = not raw[stop:].strip()
    except (ValueError, RecursionError):
        value, known = None, False
    if not kinds:
        return value if known else raw
    if known and "integer" in kinds and isinstance(value, float) and value.is_integer():
        return int(value)
    if known and any(_IS[kind](value) for kind in kinds):
        return value
    if "string" in kinds:
        return raw
    raise ValueError(f"the argument {name} is {shown(raw.strip())}, but must be {' or '.join(kinds)}")


def read_value(text: str, start: int) -> tuple[Any, int]:
    """A value as JSON, Python or Gemma writes it, and where it ends. ValueError for none.

    Texts are between quotes, or between two marks <|"|>. A quote within a text that is not escaped ends it only where
    the value may end there, as some templates escape nothing.
    """
    start = _next(text, start)
    first = text[start : start + 1]
    if first in ("'", '"') or text.startswith(_MARK, start):
        return _quoted(text, start, ",)]}")
    if first == "{":
        entries, stop = _items(text, start + 1, "}", _entry)
        return dict(entries), stop + 1
    if first == "[":
        values, stop = _items(text, start + 1, "]", read_value)
        return values, stop + 1
    word = _WORD.match(text, start)
    if word and word[0] in _NAMES:
        return _NAMES[word[0]], word.end()
    if word and _NUMBER.fullmatch(word[0]):
        return (int if _WHOLE.fullmatch(word[0]) else float)(word[0]), word.end()
    raise ValueError(f"{shown(text[start : start + 40])} is no value")


_MARK = '<|"|>'
_SPACE, _WORD, _BARE = re.compile(r"\s*"), re.compile(r"[\w.+-]+"), re.compile(r"[^\s:={}\[\](),\"'][^:={}\[\](),]*")
_WHOLE, _NUMBER = re.compile(r"[+-]?\d+"), re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?")
_NAMES = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|(\n)|([nrtbf0\\'\"/]))")
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "b": "\b", "f": "\f", "0": "\0"}
_IS: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


def _properties(tools: Sequence[Mapping[str, Any]], name: str) -> Properties:
    own = (tool.get("function", tool) for tool in tools)
    schema = next((one.get("parameters") or {} for one in own if one.get("name") == name), {})
    return dict(schema.get("properties") or {})


def _kinds(schema: Mapping[str, Any]) -> list[str]:
    """The types that a schema allows; none where it does not say."""
    given = schema.get("type", [])
    kinds = [given] if isinstance(given, str) else list(given)
    for one in (*schema.get("anyOf", ()), *schema.get("oneOf", ())):
        kinds += _kinds(one)
    for value in (*schema.get("enum", ()), *([schema["const"]] if "const" in schema else ())) if not kinds else ():
        kinds += [kind for kind in ("string", "boolean", "integer", "number", "null") if _IS[kind](value)][:1]
    kinds += ["null"] if schema.get("nullable") else []
    return [kind for kind in dict.fromkeys(kinds) if kind in _IS]


def _items(text: str, start: int, close: str, read: Callable[[str, int], tuple[T, int]]) -> tuple[list[T], int]:
    """Items with commas between them, up to the closing letter, and where that is. ValueError for what is none."""
    items: list[T] = []
    at = _next(text, start)
    while not text.startswith(close, at):
        if items:
            at = _next(text, _past(text, at, ","))
            if text.startswith(close, at):  # a comma at the end
                break
        item, at = read(text, at)
        items.append(item)
        at = _next(text, at)
    return items, at


def _entry(text: str, start: int, mark: str = ":") -> tuple[tuple[str, Any], int]:
    """A name and a value, with a mark between them."""
    if text[start : start + 1] in ("'", '"') or text.startswith(_MARK, start):
        name, stop = _quoted(text, start, mark)
    elif bare := _BARE.match(text, start):
        name, stop = bare[0].strip(), bare.end()
    else:
        raise ValueError(f"{shown(text[start : start + 40])} is not a name with a value")
    value, stop = read_value(text, _past(text, _next(text, stop), mark))
    return (name, value), stop


def _quoted(text: str, start: int, after: str) -> tuple[str, int]:
    """A text between quotes or marks. after: letters that may follow it."""
    if text.startswith(_MARK, start):
        stop = text.find(_MARK, start + len(_MARK))
        if stop < 0:
            raise ValueError("a text is not closed")
        return text[start + len(_MARK) : stop], stop + len(_MARK)
    quote, at = text[start], start + 1
    while at < len(text):
        if text[at] == quote and ((follows := _next(text, at + 1)) == len(text) or text[follows] in after):
            own = _ESCAPE.sub(_unescaped, text[start + 1 : at])
            return own.encode("utf-16", "surrogatepass").decode("utf-16", "replace"), at + 1
        at += 2 if text[at] == "\\" else 1
    raise ValueError("a text is not closed")


def _unescaped(found: re.Match[str]) -> str:
    if code := found[1] or found[2] or found[3]:
        return chr(min(int(code, 16), 0x10FFFF))
    return "" if found[4] else _LETTERS.get(found[5], found[5])


def _next(text: str, start: int) -> int:
    """Where the next letter is that is no white space."""
    found = _SPACE.match(text, start)
    return found.end() if found else start


def _past(text: str, start: int, letter: str) -> int:
    """The place after a letter. ValueError for another."""
    if not text.startswith(letter, start):
        raise ValueError(f"{letter} is missing before {shown(text[start : start + 40])}")
    return start + 1
