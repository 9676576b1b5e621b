"""Replies whose calls are no JSON, read by the package renderers, which agrees with the published template on ids."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

sys.path.append(str(Path(__file__).parents[1]))

from chat_templates import FOLDER, NAMES, tokenizer_with

from jaxrl_llm.data.chat.encode import encode_prompt
from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.environments.tools.base import Toolbox
from jaxrl_llm.utils.errors import InputError

needs_templates = pytest.mark.skipif(not NAMES, reason="there is no TRL beside the environment: make .dev")
# What the package wants of a tokenizer beside what the template writes.
MORE = {"qwen3_5_think": ("<|endoftext|>",), "nemotron_3_nano": ("<|endoftext|>",)}
ENDS = "<|im_end|>"


def tokenizer_of(name: str) -> Any:
    made = tokenizer_with((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"))
    tokens = [AddedToken(text, special=True, normalized=False) for text in MORE[name]]
    made.add_tokens(tokens, special_tokens=True)
    return made


def look(text: str, at: int) -> str:
    """Look.

    Args:
        text: What.
        at: Where.
    """
    return f"{text} at {at}"


@needs_templates
def test_without_the_package_the_line_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "renderers", None)
    turns = ChatTurns(tokenizer_of("nemotron_3_nano"), Toolbox([look]).schemas)
    with pytest.raises(InputError, match=r"in a format other than JSON: install renderers"):
        assert turns.reading
    assert ChatTurns(tokenizer_of("nemotron_3_nano")).reading, "without tools nothing is called"


@needs_templates
@pytest.mark.parametrize("name", MORE)
def test_calls_as_the_template_writes_them_are_read_and_answered(name: str) -> None:
    pytest.importorskip("renderers")
    box = Toolbox([look])
    turns = ChatTurns(tokenizer_of(name), box.schemas)
    asked = {"role": "user", "content": "so?"}
    calls = [
        {"type": "function", "function": {"name": "look", "arguments": {"text": text, "at": 3}}}
        for text in ("a\nb", "<c>")
    ]
    text = turns.written([asked, {"role": "assistant", "content": "", "tool_calls": calls}])
    answer = text[len(turns.written([asked])) :]
    sampled = turns.encode("</think>" + answer[answer.index("<tool_call>") :].rstrip("\n"))
    reply = turns.reading(sampled)
    assert [tuple(one) for one in reply.calls] == [
        ("look", {"text": "a\nb", "at": 3}),
        ("look", {"text": "<c>", "at": 3}),
    ]
    assert (reply.fault, reply.broken) == (None, ())
    seen = asyncio.run(box.answer(reply))
    assert [one["content"] for one in seen.messages] == ["a\nb at 3", "<c> at 3"]
    more = turns.bridge(seen.messages, sampled[-1])
    assert more is not None
    broken = turns.reading.text("</think><tool_call>\n<function=look>\n<parameter=text>\nx" + ENDS)
    assert broken.fault or broken.broken or not broken.calls


@needs_templates
@pytest.mark.parametrize(("name", "family"), [("qwen3_5_think", "qwen3.5"), ("nemotron_3_nano", "nemotron-3")])
def test_the_packages_ids_are_those_of_the_published_template(name: str, family: str) -> None:
    renderers = pytest.importorskip("renderers")
    tokenizer = tokenizer_of(name)
    renderer = renderers.create_renderer(tokenizer, renderers.config_from_name(family))
    user = {"role": "user", "content": "2 + 2?"}
    for messages in (
        [user],
        [{"role": "system", "content": "Be brief."}, user],
        [user, {"role": "assistant", "content": "4."}, {"role": "user", "content": "And 3?"}],
    ):
        assert renderer.render_ids(messages, add_generation_prompt=True) == encode_prompt(tokenizer, messages)
