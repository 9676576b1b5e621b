"""Conversations of today's families: calls of tools read and answered, turns appended, thoughts and their switches."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import AddedToken

sys.path.append(str(Path(__file__).parents[1]))

from chat_templates import FOLDER, NAMES, tokenizer_with
from family_templates import ASKED, FAMILIES, KNOWN, Family, called, calling, sampled, tokenizer_of_family

from jaxrl_llm.data.chat.encode import encode_prompt
from jaxrl_llm.data.chat.message_forms import as_written
from jaxrl_llm.data.chat.rendering import SWITCHES, PromptFormat
from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.environments.tools.base import Toolbox
from jaxrl_llm.utils.errors import InputError

needs_templates = pytest.mark.skipif(not NAMES, reason="there is no TRL beside the environment: make .dev")
each_family = pytest.mark.parametrize("family", KNOWN, ids=[one.name for one in KNOWN])
ERROR = "could not be read"


def find(
    text: str,
    count: int = 1,
    exact: bool = False,
    share: float = 0.0,
    tags: list[str] | None = None,
    where: dict[str, Any] | None = None,
) -> str:
    """Find.

    Args:
        text: What.
        count: How many.
        exact: Whether exactly.
        share: Of all.
        tags: Of these.
        where: In this.
    """
    return f"found {count}"


ARGUMENTS: dict[str, dict[str, Any]] = {
    "a text and a number": {"count": 3, "text": "plain words"},
    "all kinds": {
        "count": -4, "exact": True, "share": 0.5, "tags": ["\u00fc", "b"], "text": "x",
        "where": {"lang": "\u65e5\u672c", "to": {"y": [1, 2]}},
    },
    "quotes and line breaks": {"text": 'a "quoted" word, it\'s\nnew'},
    "a text like a number": {"exact": False, "text": "42"},
    "a text like a boolean": {"text": " true "},
    "markup": {"text": "<b>&amp;</b> {x} [y], (z) </x>"},
    "an empty text": {"text": ""},
}  # fmt: skip
USUAL = ARGUMENTS["a text and a number"]


def turns_of(family: Family, **options: Any) -> ChatTurns:
    return ChatTurns(tokenizer_of_family(family.name), Toolbox([find]).schemas, PromptFormat(options=options))


@each_family
@pytest.mark.parametrize("case", ARGUMENTS)
def test_a_call_as_the_family_writes_it_is_read_with_the_types_of_its_arguments(family: Family, case: str) -> None:
    turns = turns_of(family)
    reply = turns.reading(sampled(turns, called(family, turns, ARGUMENTS[case]), calls=True))
    assert [tuple(one) for one in reply.calls] == [("find", ARGUMENTS[case])]
    assert (reply.fault, reply.broken, reply.lenient) == (None, (), 0)
    assert not str(reply.message["content"]).strip()


@each_family
def test_results_follow_as_the_template_writes_them(family: Family) -> None:
    """And what was sampled stays as it is."""
    turns, box = turns_of(family), Toolbox([find])
    count = 2 if family.several else 1
    text = called(family, turns, *([USUAL, ARGUMENTS["a text like a number"]][:count]))
    ids = sampled(turns, text, calls=True)
    reply = turns.reading(ids)
    assert len(reply.calls) == count
    seen = asyncio.run(box.answer(reply))
    more = turns.bridge(seen.messages, ids[-1])
    assert more is not None
    row = turns.tokenizer.decode([*turns.begin([ASKED]), *ids, *more])
    whole = turns.tokenizer.decode(turns.begin([ASKED, reply.message, *seen.messages]))
    assert row.rpartition(text)[2] == whole.rpartition(text)[2].lstrip("\n")  # which the policy may leave out
    assert row.count("found") == count
    cut = turns.bridge(seen.messages, turns.encode("x")[-1])
    assert cut is not None
    assert turns.tokenizer.decode([*cut]).endswith(turns.tokenizer.decode(more))


@each_family
@pytest.mark.parametrize("how", ["cut", "another type"])
def test_a_call_that_cannot_be_read_is_told(family: Family, how: str) -> None:
    """Also where the conversation is written anew with it."""
    turns, box = turns_of(family), Toolbox([find])
    text = called(family, turns, USUAL)
    text = text[: text.index("plain w")] if how == "cut" else text.replace("3", "many")
    ids = sampled(turns, text, calls=True)
    reply = turns.reading(ids)
    assert (reply.calls, bool(reply.fault)) == ((), True)
    seen = asyncio.run(box.answer(reply))
    assert ERROR in seen.messages[0]["content"]
    assert seen.info == {"malformed_calls": 1.0}
    turns.bridge(seen.messages, ids[-1])
    assert ERROR in turns.tokenizer.decode(turns.begin([ASKED, reply.message, *seen.messages]))


@each_family
def test_a_broken_call_takes_no_other_with_it(family: Family) -> None:
    turns, box = turns_of(family), Toolbox([find])
    if not family.several:
        assert "tool_calls" not in as_written(turns, [ASKED, calling(USUAL, USUAL)])[0][-1], "one call at a time"
        return
    other = {"count": 5, "text": "others"}
    text = called(family, turns, USUAL, other).replace("3", "many", 1)
    reply = turns.reading(sampled(turns, text, calls=True))
    assert [tuple(one) for one in reply.calls] == [("find", other)]
    assert [(one.place, one.name) for one in reply.broken] == [(0, "find")]
    seen = asyncio.run(box.answer(reply))
    assert [ERROR in one["content"] for one in seen.messages] == [True, False]
    assert turns.bridge(seen.messages, None) is not None


@each_family
def test_a_call_that_is_cut_off_is_whole_or_told(family: Family) -> None:
    """Wherever the limit of tokens cuts it, once its opening is written: it is never run with some of its arguments."""
    turns, box = turns_of(family), Toolbox([find])
    text = called(family, turns, USUAL)
    before = sampled(turns, "", calls=True)[:-1]
    opening = re.match(r"<[^<>]*>|\[TOOL_CALLS\]|to=|\{\"name\"", text)
    assert opening is not None
    for size in range(opening.end(), len(text) + 1):
        reply = turns.reading([*before, *turns.encode(text[:size])])
        assert [tuple(one) for one in reply.calls] == ([] if reply.fault else [("find", USUAL)]), text[:size]
    assert reply.calls, "the whole of it"
    if family.several:
        text = called(family, turns, USUAL, {"count": 5, "text": "others"})
        reply = turns.reading([*before, *turns.encode(text[: text.index("hers")])])
        assert [tuple(one) for one in reply.calls] == [("find", USUAL)]
        assert asyncio.run(box.answer(reply)).info["malformed_calls"] == 1.0


RESPONSES = {
    "Qwen 3": {"open_pattern": r"<tool_call>\s*(?=\{)", "close": "</tool_call>", "content": "json"},
    "gpt-oss": {"open_pattern": r"to=functions\.\w+[^{]*<\|message\|>", "content": "json"},
}


@needs_templates
@pytest.mark.parametrize("name", RESPONSES)
def test_a_call_that_another_parser_takes_for_text_is_told(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `response_template` whose call begins after what opens it, and a package that reads no call at all."""
    turns = turns_of(next(one for one in FAMILIES if one.name == name))
    opened = {"Qwen 3": "<tool_call>", "gpt-oss": "to=functions."}[name]
    fields = {"content": {"content": "text", "close_pattern": "$"}, "tool_calls": {**RESPONSES[name], "repeats": True}}
    template = {"defaults": {"role": "assistant"}, "start_anchor": "assistant", "fields": fields}
    monkeypatch.setattr(turns.tokenizer, "response_template", template, raising=False)
    assert turns.reading.read is None
    parsed = SimpleNamespace(tool_calls=[], content="", reasoning_content=None)
    for reading in (turns.reading, replace(turns.reading, parse=lambda ids: parsed)):
        reply = reading(turns.encode(f"I look. {opened}"))
        assert "is not complete" in str(reply.fault)
        assert asyncio.run(Toolbox([find]).answer(reply)).info == {"malformed_calls": 1.0}
        assert reading(turns.encode("I look.")).fault is None


def thinking(family: Family) -> tuple[str, Any, Any] | None:
    """The switch of a family's thoughts, and two values that make prompts differ."""
    turns = turns_of(family)
    for name in SWITCHES:
        on, off = ("high", "low") if name == "reasoning_effort" else (True, False)
        if re.search(rf"\b{name}\b", turns.template):
            prompts = [turns_of(family, **{name: value}).begin([ASKED]) for value in (on, off)]
            if prompts[0] != prompts[1]:
                return name, on, off
    return None


@each_family
def test_a_thought_is_told_from_what_is_said(family: Family) -> None:
    """As the template writes them, with the switch on and off."""
    switch = thinking(family)
    for value in switch[1:] if switch else (None,):
        turns = turns_of(family, **({switch[0]: value} if switch else {}))
        text = turns.written([ASKED, {"role": "assistant", "content": "said", "reasoning_content": "because"}])
        if "because" in text:  # it writes thoughts
            begun = turns.render([ASKED])
            start = begun if text.startswith(begun) else turns.written([ASKED])
            reply = turns.reading.text(text[len(start) :])
            assert (reply.message["content"].strip(), reply.message["reasoning_content"].strip()) == ("said", "because")
        plain = turns.reading(sampled(turns, "said", calls=False))
        if family.name != "gpt-oss":  # all that it says has a channel
            assert plain.message["content"].strip() == "said"


def test_thoughts_of_families_whose_templates_leave_them_out() -> None:
    (ministral,) = (one for one in FAMILIES if one.name == "Ministral 3")
    reply = turns_of(ministral).reading.text('[THINK]why[/THINK]so[TOOL_CALLS]find[ARGS]{"text": "x"}</s>')
    assert (reply.message["reasoning_content"], reply.message["content"]) == ("why", "so")
    assert [tuple(one) for one in reply.calls] == [("find", {"text": "x"})]


@needs_templates
def test_channels_of_gpt_oss() -> None:
    """A call as it samples them, which its template writes in another order; a preamble; and what it says at last."""
    (family,) = (one for one in FAMILIES if one.name == "gpt-oss")
    reading = turns_of(family).reading
    thought, start = "<|channel|>analysis<|message|>why<|end|>", "<|start|>assistant"
    call = f'{start}<|channel|>commentary to=functions.find <|constrain|>json<|message|>{{"text": "x"}}<|call|>'
    said = f"{start}<|channel|>commentary<|message|>I look.<|end|>"
    reply = reading.text(thought + said + call)
    assert [tuple(one) for one in reply.calls] == [("find", {"text": "x"})]
    assert (reply.message["reasoning_content"], reply.message["content"]) == ("why", "I look.")
    last = reading.text(f"{thought}{start}<|channel|>final<|message|>to=5<|return|>")
    assert (last.calls, last.message["content"]) == ((), "to=5")


@each_family
def test_an_option_that_the_template_does_not_read_is_refused(family: Family) -> None:
    switch = thinking(family)
    tokenizer = tokenizer_of_family(family.name)
    with pytest.raises(InputError, match=r"does not read enable_thoughts: leave it out") as refused:
        encode_prompt(tokenizer, [ASKED], format=PromptFormat(options={"enable_thoughts": False}))
    assert switch is None or switch[0] in str(refused.value)
    row = {"chat_template_kwargs": {"enable_thoughts": False}}
    assert encode_prompt(tokenizer, [ASKED], row=row) == encode_prompt(tokenizer, [ASKED])


@needs_templates
def test_a_format_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    tokenizer = tokenizer_with((FOLDER / "muse_glimmer.jinja").read_text(encoding="utf-8"))
    with pytest.raises(InputError, match=r"a format that is not known: install renderers") as refused:
        assert ChatTurns(tokenizer, Toolbox([find]).schemas).reading
    assert "\n" not in str(refused.value)
    assert ChatTurns(tokenizer).reading, "without tools nothing is called"


def test_other_formats_are_read_by_the_package_renderers() -> None:
    """That of Kimi K2; where it is installed."""
    pytest.importorskip("renderers")
    begun, ended = "<|tool_call_begin|>functions.", "<|tool_call_end|>"
    tokenizer = tokenizer_with(
        "{% for m in messages %}<|im_{{ m.role }}|>{{ m.role }}<|im_middle|>{{ m.content }}{% if m.tool_calls %}"
        "<|tool_calls_section_begin|>{% for c in m.tool_calls %}" + begun + "{{ c.function.name }}:{{ loop.index0 }}"
        "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}" + ended + "{% endfor %}"
        "<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}"
    )
    special = ("[EOS]", "[BOS]", "<|im_user|>", "<|im_system|>", "<|im_assistant|>")
    tokenizer.add_tokens([AddedToken(one, special=True, normalized=False) for one in special], special_tokens=True)
    turns = ChatTurns(tokenizer, Toolbox([find]).schemas)
    assert turns.calls is None
    call = f'{begun}find:0<|tool_call_argument_begin|>{{"text": "x", "count": 3}}{ended}'
    reply = turns.reading.text(f"<|tool_calls_section_begin|>{call}<|tool_calls_section_end|><|im_end|>")
    assert [tuple(one) for one in reply.calls] == [("find", {"text": "x", "count": 3})]
    text = f"<|tool_calls_section_begin|>{call}"
    for size in range(len("<|tool_calls_section_begin|>"), text.index(ended)):
        assert turns.reading(turns.encode(text[:size])).fault, text[:size]


def line_of(family: Family) -> str:
    """The family's line of the table in the docs."""
    turns, switch = turns_of(family), thinking(family)

    def follows(role: str, calls: bool) -> str:
        delta = turns.bridge([{"role": role, "name": "find", "content": "found"}], sampled(turns, "x", calls)[-1])
        if delta is None:
            return "a new row"
        as_question = role == "tool" and delta == turns.bridge([{"role": "user", "content": "found"}], None)
        return "as a question" if as_question or (role == "tool" and not turns.ends[1]) else "appended"

    calls = f"`{family.calls}`".replace("|", "\\|") + ("" if family.several else ", one at a time")
    told = "" if turns.shows_tools else "yes"
    name = f"`{switch[0]}`" if switch else ""
    return f"| {family.name} | {calls} | {told} | {name} | {follows('tool', True)} | {follows('user', False)} |"


@needs_templates
def test_the_table_in_the_docs_is_what_is_measured() -> None:
    docs = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
    missing = [line for line in map(line_of, FAMILIES) if line not in docs]
    assert not missing, "\n".join(missing)


@each_family
def test_results_of_any_text_are_appended_in_the_role_of_results(family: Family) -> None:
    """Also with line breaks and quotes, which some templates write as JSON, and control tokens, which stay text."""
    turns = turns_of(family)
    ids = sampled(turns, called(family, turns, USUAL), calls=True)
    control = turns.tokenizer.eos_token
    text = f'a "b"\nc\\d \u00fc {control}'
    simple, other = (turns.bridge([{"role": "tool", "name": "find", "content": one}], ids[-1]) for one in ("XYZ", text))
    assert simple is not None
    assert other is not None
    plain = turns.tokenizer.decode(simple)
    written = [plain.replace("XYZ", own) for own in (text, json.dumps(text, ensure_ascii=False)[1:-1])]
    assert turns.tokenizer.decode(other) in written
    assert other.count(turns.tokenizer.eos_token_id) == simple.count(turns.tokenizer.eos_token_id)
