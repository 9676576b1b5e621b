"""Chat templates with a date, options, tools and thoughts of earlier replies, and the dialect without a template."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers.utils.chat_template_utils as template_utils
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1]))

from chat_templates import tokenizer_with

from jaxrl_llm.data import PromptFormat, encode_prompt
from jaxrl_llm.data.chat.rendering import dated
from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.data.prompt_set import encode_rows
from jaxrl_llm.utils.errors import InputError

WITH_DATE = (
    "{%- if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif -%}\n"
    "{% macro day() %}{{ strftime_now('%Y-%m-%d') }}{% endmacro %}"
    "Today: {{ date_string }}, {{ day() }}\n{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
OPTIONS = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}{% endif %}"
)
# The thoughts of replies before the last question are left out.
FORGETS = (
    "{% set last = namespace(user=0) %}"
    "{% for m in messages %}{% if m.role == 'user' %}{% set last.user = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and m.reasoning_content and loop.index0 > last.user %}<think>\n"
    "{{ m.reasoning_content }}{{ '\n' }}</think>\n\n{% endif %}{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "look", "description": "Look.", "parameters": {}, "strict": None}}
ASKED = [{"role": "user", "content": "hi"}]


def text_of(template: str | None, prompt: Any, row: Any = None, system: str | None = None, **format: Any) -> str:
    tokenizer = tokenizer_with(template)
    ids = encode_prompt(tokenizer, prompt, system_prompt=system, format=PromptFormat(**format), row=row)
    return str(tokenizer.decode(ids))


def test_the_date_is_the_formats_and_else_that_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert text_of(WITH_DATE, ASKED, date="2031-01-02").startswith("Today: 02 Jan 2031, 2031-01-02\n")
    today = text_of(WITH_DATE, ASKED)

    class Later(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.datetime(2077, 1, 1)

    monkeypatch.setattr(template_utils, "datetime", Later)
    assert text_of(WITH_DATE, ASKED) == today
    options = {"date_string": "1 May 1900"}
    assert text_of(WITH_DATE, ASKED, options=options, date="2031-01-02").startswith("Today: 1 May 1900, 2031-01-02")


@settings(deadline=None)
@given(
    st.dates(datetime.date(1970, 1, 1)),
    st.lists(st.sampled_from(["%d", "%b", "%B", "%Y", "%m", "%A", "%H:%M", "%-d", "%j", "x", "%%"])),
)
def test_dates_are_written_as_strftime_does(date: datetime.date, pieces: list[str]) -> None:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    form = " ".join(pieces)
    template = f"  {{% if true %}}{{{{ strftime_now({form!r}) }}}}{{% endif %}}"
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    found = environment.from_string(dated(template, date.isoformat())).render()
    assert found == datetime.datetime.combine(date, datetime.time()).strftime(form)


def test_a_row_has_options_and_tools_of_its_own() -> None:
    assert text_of(OPTIONS, ASKED) == "<|user|>hi<|assistant|>"
    assert text_of(OPTIONS, ASKED, options={"enable_thinking": False}).endswith("<|assistant|><think></think>")
    for own in ({"enable_thinking": True, "other": None}, '{"enable_thinking": true}'):
        row = {"chat_template_kwargs": own}
        assert text_of(OPTIONS, ASKED, row, options={"enable_thinking": False}).endswith("<|assistant|>")
    for tools in ([TOOL], json.dumps([TOOL]), [json.dumps(TOOL)], [TOOL["function"]]):
        text = text_of(OPTIONS, ASKED, {"tools": tools})
        assert '"name": "look"' in text
        assert "null" not in text
    with pytest.raises(InputError, match=r"chat_template_kwargs is list .*must be an object"):
        text_of(OPTIONS, ASKED, {"chat_template_kwargs": [1]})


def test_rows_are_encoded_with_their_columns(caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"prompt": "hi", "tools": [TOOL], "chat_template_kwargs": {"enable_thinking": x}} for x in (True, False)]
    tokenizer = tokenizer_with(OPTIONS)
    found = encode_rows(tokenizer, rows, max_tokens=500, long_prompts="error", system_prompt=None)
    first, second = (tokenizer.decode(ids) for ids in found.ids)
    assert second == first + "<think></think>"
    assert "look" in first
    assert not caplog.records
    encode_rows(tokenizer_with(FORGETS), rows, max_tokens=500, long_prompts="error", system_prompt=None)
    assert [one.getMessage() for one in caplog.records] == [
        "the column tools is not used: the chat template describes no tools"
    ]


THOUGHT = [
    *ASKED,
    {"role": "assistant", "content": "ho", "reasoning_content": "hm"},
    {"role": "user", "content": "so?"},
]


def test_thoughts_of_earlier_replies_are_kept_or_left_out() -> None:
    kept = "<|im_start|>assistant\n<think>\nhm\n</think>\n\nho<|im_end|>"
    assert kept in text_of(FORGETS, THOUGHT)
    assert kept in text_of(FORGETS, THOUGHT[:2]) + "<|im_end|>"
    assert "<|im_start|>assistant\nho<|im_end|>" in text_of(FORGETS, THOUGHT, thoughts="as-template")


def test_a_dialect_without_a_chat_template() -> None:
    tokenizer = tokenizer_with(None)
    turns = ChatTurns(tokenizer, (TOOL,))
    text = tokenizer.decode(turns.begin([{"role": "system", "content": "Be brief."}, *ASKED]))
    assert text.startswith("System: Be brief.\n\nYou may call these tools:")
    assert text.endswith("\n\nUser: hi\n\nAssistant:")
    assert (turns.reply_start, turns.reply_end) == ("Assistant:", "<eos>\n\n")
    sampled = turns.encode(' <tool_call>\n{"name": "look", "arguments": {}}\n</tool_call><eos>')
    reply = turns.reading(sampled)
    assert [tuple(one) for one in reply.calls] == [("look", {})]
    more = turns.bridge([{"role": "tool", "content": "a door"}], sampled[-1])
    assert more is not None
    assert tokenizer.decode(more) == "\n\nResult: a door\n\nAssistant:"
    cut = turns.bridge([{"role": "user", "content": "and <eos>?"}], turns.encode(" so")[-1])
    assert cut is not None
    assert tokenizer.decode(cut) == "<eos>\n\nUser: and <eos>?\n\nAssistant:"
    assert cut.count(tokenizer.eos_token_id) == 1, "a user ends no reply"
    assert turns.reading(turns.encode(" It is 4.\n\nUser: next?<eos>")).message["content"] == "It is 4."
    with pytest.raises(InputError, match="a prompt of messages needs a chat template"):
        encode_prompt(tokenizer, ASKED)


KNOWS = (
    "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}<|{{ m.role }}|>{{ m.content }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        ([{"role": "critic", "content": "x"}, *ASKED], "message 1: the chat template drops or repeats the content"),
        ([{"role": "system", "content": "x"}, *ASKED], "message 1: .* of the role system: give it another role"),
        ([{"role": "user|>", "content": "x"}], r"message 1: its role is 'user\|>', but must be a word"),
        ([*ASKED, {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}],
         "message 2 calls tools that nothing answers"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "of the role user, with a part of type image"),
    ],
)  # fmt: skip
def test_what_is_dropped_in_every_form_is_refused(messages: Any, line: str) -> None:
    with pytest.raises(InputError, match=line) as caught:
        text_of(KNOWS, messages)
    assert "\n" not in str(caught.value)
    assert text_of(KNOWS, [*ASKED, {"role": "tool", "content": "r"}]) == "<|user|>hi<|user|>r<|assistant|>"
