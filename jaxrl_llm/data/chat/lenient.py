"""Calls of tools in a reply that is not quite as it should be, read one by one.

Strings with raw line breaks, invalid escapes such as \\d, a call without its closing tag, and a closing tag within a
string are read as they were meant. A call that cannot be read takes no other with it.
"""

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from jaxrl_llm.utils.errors import shown


class ReadCall(NamedTuple):
    """A call of a tool."""

    name: str
    arguments: Mapping[str, Any]


class BrokenCall(NamedTuple):
    """A call that could not be read."""

    place: int  # among all calls of its reply, from 0
    name: str  # what it seems to call; "unreadable" where that is not known either
    why: str  # in one line


class CallFormat(NamedTuple):
    """How a chat template writes calls: JSON between two texts."""

    opened: str  # empty: the reply is the call
    closed: str  # empty: the end of the reply
    is_list: bool = False  # whether the JSON is a list of calls


class Calls(NamedTuple):
    """The calls of a reply."""

    calls: tuple[ReadCall, ...]
    broken: tuple[BrokenCall, ...]
    rest: str  # the reply without them
    lenient: int  # how many were read though they were not as they should be
    end: int = 0  # where the last call ends


_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})|\\')
_STRICT, _LENIENT = json.JSONDecoder(), json.JSONDecoder(strict=False)
_BEGUN = r'\{\s*"(?:name"|type"\s*:\s*"function")'  # a call, as models of Llama write it, too
_NAMED = re.compile(r"""["']name["']\s*:\s*["']([^"'\n]{1,80})""")


def read_lenient_json(text: str, start: int = 0) -> tuple[Any, int, bool]:
    """The JSON value that begins at a place of a text, where it ends, and whether it is not quite JSON.

    ValueError for what is no JSON either with raw line breaks in strings and other escapes.

    >>> read_lenient_json(r'{"pattern": "\\d+"} and more')
    ({'pattern': '\\\\d+'}, 18, True)
    """
    with suppress(ValueError):
        return *_decoded(_STRICT, text, start), False
    added = list[int]()

    def escaped(found: re.Match[str]) -> str:
        if found[0] != "\\":
            return found[0]
        added.append(found.start() + len(added))  # in the longer text
        return "\\\\"

    value, stop = _decoded(_LENIENT, _ESCAPE.sub(escaped, text[start:]))
    return value, start + stop - sum(place < stop for place in added), True


def _decoded(decoder: json.JSONDecoder, text: str, start: int = 0) -> tuple[Any, int]:
    try:
        return decoder.raw_decode(text, start)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def call_of(found: Any) -> ReadCall:
    """A call from an entry of "tool_calls". ValueError if it is none."""
    if not isinstance(found, Mapping):
        raise ValueError(f'a call is a JSON object with "name" and "arguments", but found {shown(found)}')
    function = found.get("function", found)
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError('a call is a JSON object with "name" and "arguments"')
    arguments = function.get("arguments", function.get("parameters", {}))
    if arguments is None or arguments == "":  # as some write that there are none
        arguments = {}
    if isinstance(arguments, str):
        arguments = read_lenient_json(arguments.strip())[0]
    if not isinstance(arguments, Mapping):
        raise ValueError(f"the arguments of {function['name']} are no JSON object")
    return ReadCall(function["name"], arguments)


def read_calls(text: str, form: CallFormat) -> Calls:
    """The calls in a reply's text, without what ends it; a reply that thinks is read after its thought."""
    calls: list[ReadCall] = []
    broken: list[BrokenCall] = []
    rest, done, lenient = [], 0, 0
    for start, stop, found, complete in _spans(text, form):
        rest.append(text[done:start])
        done = stop
        for value, loose, raw in found:
            try:
                if isinstance(value, ValueError):
                    raise value
                calls.append(call_of(value))
                lenient += loose or not complete
            except ValueError as error:
                name = _NAMED.search(raw)
                what = "it is no valid JSON: " if isinstance(error, json.JSONDecodeError) else ""
                why = what + " ".join(str(error).split())[:200]
                broken.append(BrokenCall(len(calls) + len(broken), name[1] if name else "unreadable", why))
    return Calls(tuple(calls), tuple(broken), "".join([*rest, text[done:]]), lenient, done)


Value = tuple[Any, bool, str]  # JSON or a ValueError, whether it was read leniently, and its text


def _spans(text: str, form: CallFormat) -> Iterator[tuple[int, int, list[Value], bool]]:
    """From where to where calls are, their values, and whether they are closed."""
    place = 0
    while True:
        if form.opened:
            start = text.find(form.opened, place)
            body = start + len(form.opened)
        else:
            opening = re.compile(rf"(?:<\|python_tag\|>)?[\s;]*(?={_BEGUN})").match(text, place)
            start, body = (-1, -1) if opening is None else opening.span()
        if start < 0:
            return
        body = len(text) - len(text[body:].lstrip())
        found, stop = _values(text, body, form)
        tail = len(text) - len(text[stop:].lstrip())
        is_closed = not form.closed or text.startswith(form.closed, tail)
        if is_closed:
            stop = tail + len(form.closed)
        yield start, stop, found, is_closed
        place = stop


def _values(text: str, start: int, form: CallFormat) -> tuple[list[Value], int]:
    """The values of one opening, and where they end."""
    try:
        value, stop, loose = read_lenient_json(text, start)
        several = value if isinstance(value, list) else [value]
        out: list[Value] = [(one, loose, text[start:stop]) for one in several]
        more = re.compile(rf"[\s,;]*(?={_BEGUN})").match(text, stop)
        if not form.closed or more is None:
            return out, stop
        others, stop = _values(text, more.end(), form)  # several calls between one pair of tags
        return [*out, *((one, True, raw) for one, _, raw in others)], stop
    except ValueError as error:
        ends = [text.find(mark, start) for mark in (form.closed, form.opened) if mark]
        end = min((place for place in ends if place >= 0), default=len(text))
        if not form.is_list:
            return [(error, False, text[start:end])], end
    found: list[Value] = []
    stop = start
    for opening in re.finditer(_BEGUN, text[:end]):  # each by itself
        if (place := opening.start()) < max(start, stop):
            continue
        try:
            value, stop, loose = read_lenient_json(text, place)
            found.append((value, loose, text[place:stop]))
        except ValueError as error:
            found.append((error, False, text[place:end]))
    return found or [(ValueError("it is no JSON"), False, text[start:end])], max(end, stop)
