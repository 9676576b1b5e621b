"""Calls that are no JSON objects: values of Python and JSON, raw values typed by schemas, and any text at all."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_llm.data.chat.call_formats import FORMATS, as_python
from jaxrl_llm.data.chat.call_syntax import read_value, typed

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts
values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6
)
names = st.from_regex(r"[a-z_]{1,5}", fullmatch=True)


@given(values)
def test_what_python_and_json_write_is_read(value: Any) -> None:
    for text in (repr(value), json.dumps(value), json.dumps(value, ensure_ascii=False, indent=1)):
        assert read_value(f" {text}, more", 0) == (value, len(text) + 1)


def test_gemma_writes_texts_between_marks_and_bare_names() -> None:
    mark = '<|"|>'
    text = f'{{a b:{mark}x}}, "y"{mark},c:[{mark}{mark},true,-1.5e3],{mark}d:{mark}:null}}'
    assert read_value(text, 0) == ({"a b": 'x}, "y"', "c": ["", True, -1500.0], "d:": None}, len(text))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'it's\nso'", "it's\nso"),  # as some templates write it
        (r"'a \d'", r"a \d"),
        (r'"\ud83d\ude00"', "\U0001f600"),
        (r"'\x41\u00e9\U0001f600\0'", "A\u00e9\U0001f600\0"),
        ("[1, 2,]", [1, 2]),
        ("+.5", 0.5),
    ],
)
def test_values_that_are_not_quite_python_or_json(text: str, value: Any) -> None:
    assert read_value(text, 0) == (value, len(text))


@pytest.mark.parametrize("text", ["", "many", "[1", "{1", "'a", "{'a' 1}", "[1 2]", '<|"|>a', "--1", "nan"])
def test_what_is_no_value(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        read_value(text, 0)


@pytest.mark.parametrize(
    ("raw", "schema", "value"),
    [
        ("42", {"type": "string"}, "42"),
        (" 42\n", {"type": "string"}, " 42\n"),
        ("42", {"type": "integer"}, 42),
        ("42.0", {"type": "integer"}, 42),
        ("42", {"type": "number"}, 42),
        ("True", {"type": "boolean"}, True),
        ("false", {"type": "boolean"}, False),
        ("['a', 'b']", {"type": "array"}, ["a", "b"]),
        ('{"a": [1]}', {"type": "object"}, {"a": [1]}),
        ("None", {"type": ["integer", "null"]}, None),
        ("null", {"type": "integer", "nullable": True}, None),
        ("3", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, 3),
        ("three", {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "three"),
        ("2", {"enum": ["1", "2"]}, "2"),
        ("2", {"enum": [1, 2]}, 2),
        ("2", {}, 2),
        ("two words", {}, "two words"),
        ("[" * 5000, {}, "[" * 5000),
    ],
)
def test_raw_values_have_the_types_of_the_schema(raw: str, schema: Any, value: Any) -> None:
    found = typed(raw, schema)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("raw", "kind"), [("many", "integer"), ("1.5", "integer"), ("true", "integer"), ("1", "boolean"), ("x", "object")]
)
def test_a_raw_value_of_another_type_is_said(raw: str, kind: str) -> None:
    with pytest.raises(ValueError, match=f"the argument count is '{raw}', but must be {kind}"):
        typed(raw, {"type": kind}, "count")


TAGS = ("<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>")
PIECES = [
    *(one.mark for one in FORMATS), *TAGS, "f", "<arg_key>a</arg_key>", "<arg_value>1</arg_value>",
    "<|channel|>commentary to=functions.f", "<|message|>", "{}", '{"a": 1}', "<|call|>", "call:f{", "}", "<tool_call|>",
    "\uff5c>", "<\uff5ctool\u2581sep\uff5c>", "[TOOL_CALLS]f", "f(a=1)", "f(", "a='", ")", "]", "<|tool_call_end|>",
    "</function_calls>", ", ", "\n", "[" * 3000, '{"name": "f"}',
]  # fmt: skip
BEGINS = {
    "<function=": "<function=f>", "<arg_key>": "<tool_call>", "<|channel|>commentary": "<|channel|>commentary to=f",
    "[ARGS]": "[TOOL_CALLS]",
}  # fmt: skip


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.families)
@settings(max_examples=60, deadline=None)
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=9))
def test_whatever_a_reply_holds_no_call_is_dropped_silently(form: Any, pieces: list[str]) -> None:
    text = "".join(pieces)
    found = form.read(text, ())
    assert len(found.rest) <= len(text)
    assert 0 <= found.end <= len(text)
    if BEGINS.get(form.mark, form.mark) in text:
        assert found.calls or found.broken
    for one in found.broken:
        assert one.why
        assert "\n" not in one.why


@pytest.mark.parametrize("form", [one for one in FORMATS if one.write], ids=lambda form: form.families)
@given(arguments=st.lists(st.dictionaries(names, values, max_size=3), min_size=1, max_size=3))
@settings(max_examples=40, deadline=None)
def test_what_a_format_writes_it_reads(form: Any, arguments: list[dict[str, Any]]) -> None:
    text = form.write([{"name": "f", "arguments": one} for one in arguments])
    found = form.read(text, ())
    assert [tuple(one) for one in found.calls] == [("f", one) for one in arguments]
    assert (found.broken, found.lenient, found.rest.strip()) == ((), 0, "")


def test_arguments_as_json_text_are_written_too() -> None:
    assert as_python({"name": "f", "arguments": '{"a": true}'}) == "f(a=True)"
