"""What goes into a conversation is in its prompt once, or refused, and yields no control tokens: TRL's templates."""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import transformers.utils.chat_template_utils as template_utils
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.append(str(Path(__file__).parents[1]))

from chat_templates import each_template, tokenizer_of

from jaxrl_llm.data.chat.encode import encode_prompt
from jaxrl_llm.data.chat.inert import control_tokens
from jaxrl_llm.data.chat.rendering import PromptFormat, today
from jaxrl_llm.data.chat.turns import ChatTurns
from jaxrl_llm.utils.errors import InputError

Messages = list[dict[str, Any]]


def call(number: int, arguments: Any = None) -> dict[str, Any]:
    """A call of a tool, with a value that is to be found."""
    function = {"name": f"F{number}x", "arguments": {"q": f"V{number}x", "n": None} if arguments is None else arguments}
    return {"type": "function", "id": f"call0000{number}", "function": function}


def result(number: int, text: str, role: str = "tool") -> dict[str, Any]:
    """A result of that call."""
    return {"role": role, "tool_call_id": f"call0000{number}", "name": f"F{number}x", "content": text}


def parts(*texts: str) -> list[dict[str, Any]]:
    """A content of parts; Arrow adds what other parts have."""
    return [{"type": "text", "text": text, "image": None} for text in texts]


USER = {"role": "user", "content": "U1x"}
REPLY = {"role": "assistant", "content": "A1x"}
AGAIN = {"role": "user", "content": "U2x"}
CALLED: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call(1)]}
CONVERSATIONS: dict[str, Messages] = {
    "user": [USER],
    "parts": [{"role": "user", "content": parts("P1x ", "P2x")}],
    "parts everywhere": [
        {"role": "system", "content": parts("S1x")},
        {"role": "user", "content": parts("P1x ", "P2x")},
        {"role": "assistant", "content": parts("A1x")},
        AGAIN,
    ],
    "system": [{"role": "system", "content": "S1x"}, USER],
    "developer": [{"role": "developer", "content": "S1x"}, USER],
    "turns": [USER, REPLY, AGAIN],
    "a reply to go on with": [USER, REPLY],
    "a thought": [USER, {**REPLY, "reasoning_content": "T1x"}, AGAIN],
    "a thought of another name": [USER, {**REPLY, "thinking": "T1x"}, AGAIN],
    "a thought in the content": [USER, {"role": "assistant", "content": "<think>\nT1x\n</think>\n\nA1x"}, AGAIN],
    "a call": [USER, CALLED, result(1, "R1x")],
    "a call as text": [USER, {**CALLED, "content": None, "tool_calls": [call(1, '{"q": "V1x"}')]}, result(1, "R1x")],
    "calls": [USER, {**CALLED, "tool_calls": [call(1), call(2)]}, result(1, "R1x"), result(2, "R2x"), REPLY, AGAIN],
    "a thought and a call": [USER, {**CALLED, "reasoning_content": "T1x"}, result(1, "R1x"), REPLY, AGAIN],
    "names": [
        {**USER, "name": "N1x"},
        {**REPLY, "name": "N2x"},
        {"role": "user", "content": parts("P1x"), "name": "N3x"},
    ],
    "a function": [USER, CALLED, result(1, "R1x", "function")],
}
REFUSED = {"gemma": {"system", "developer", "parts everywhere"}}  # it says that it takes no system messages


@each_template
@pytest.mark.parametrize("case", CONVERSATIONS)
def test_what_goes_in_is_in_the_prompt_once(name: str, case: str) -> None:
    tokenizer, messages = tokenizer_of(name), CONVERSATIONS[case]
    if case in REFUSED.get(name.removesuffix("_training"), ()):
        with pytest.raises(InputError, match="the chat template rejects messages with the roles"):
            encode_prompt(tokenizer, messages)
        return
    text = tokenizer.decode(encode_prompt(tokenizer, messages))
    for marker in set(re.findall(r"[A-Z]\dx", repr(messages))):
        count = len(re.findall(marker, text))
        assert count == 1 or (marker.startswith("F") and count), f"{marker} is {count} times in {text}"
    assert "None" not in text
    assert "null" not in text, "Arrow's None is no argument"
    assert '\\"q' not in text, "arguments as text are not encoded again"
    if messages[-1]["role"] == "assistant":
        assert text.endswith("A1x"), "a last reply goes on"


@each_template
@pytest.mark.parametrize("case", ["user", "system", "turns", "a call"])
def test_ordinary_conversations_have_the_ids_of_the_template(
    name: str, case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Day(datetime.datetime):
        """The clock of the library's templates, which stays on the day of this process over midnight."""

        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.datetime.fromisoformat(today())

    monkeypatch.setattr(template_utils, "datetime", Day)
    tokenizer, messages = tokenizer_of(name), CONVERSATIONS[case]
    clean = [{k: v for k, v in one.items() if v is not None} for one in messages]
    if case == "a call":
        clean[1] = {**CALLED, "tool_calls": [call(1, {"q": "V1x"})]}
    try:
        usual = tokenizer.apply_chat_template(clean, add_generation_prompt=True, return_dict=False)
    except Exception:
        return  # a form that the template does not take: the test above
    if all(one["content"] in tokenizer.decode(usual) for one in clean) and (case != "a call" or "V1x" in str(usual)):
        assert encode_prompt(tokenizer, messages) == usual


PIECES = ["<", "|", ">", "im_", "a", " ", "\n", "end", "</", "[", "]", "think>", "\uff5c", "_of_turn>"]


@each_template
@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_nothing_that_a_text_holds_becomes_a_control_token(name: str, data: Any) -> None:
    tokenizer = tokenizer_of(name)
    control = control_tokens(tokenizer)
    assert control
    words = st.lists(st.sampled_from([*control, *control, *PIECES]), min_size=1, max_size=6).map("".join)
    said = [f"x{data.draw(words)}x" for _ in range(4)]

    def conversation(*texts: str) -> Messages:
        cut = data.draw(st.integers(1, len(texts[1]) - 1)) if len(texts[1]) > 1 else 0
        halves = parts(texts[1][:cut], texts[1][cut:]) if cut else texts[1]
        first = [] if name.removesuffix("_training") == "gemma" else [{"role": "system", "content": texts[0]}]
        return [
            *first,
            {"role": "user", "content": halves},
            CALLED,
            result(1, texts[2]),
            REPLY,
            {**USER, "content": texts[3]},
        ]

    ids = encode_prompt(tokenizer, conversation(*said))
    usual = encode_prompt(tokenizer, conversation("x", "x", "x", "x"))
    numbers = set(tokenizer.convert_tokens_to_ids(list(control)))
    assert [one for one in ids if one in numbers] == [one for one in usual if one in numbers]
    text = tokenizer.decode(ids)
    for one in said[len(said) - 3 if name.startswith("gemma") else 0 :]:
        assert one in text or repr(one)[1:-1].replace('"', '\\"') in text or one.replace("\n", "\\n") in text


@each_template
@pytest.mark.parametrize("thoughts", ["keep", "as-template"])
@pytest.mark.parametrize("case", ["turns", "calls", "thoughts"])
def test_turns_are_prefixes_of_the_next_or_a_new_row(name: str, thoughts: Any, case: str) -> None:
    """What is sampled stays, and what follows is as the template writes it; else there is no bridge."""
    turns = ChatTurns(tokenizer_of(name), format=PromptFormat(thoughts=thoughts))
    thought = {"reasoning_content": "T1x"} if case == "thoughts" else {}
    reply = {**CALLED} if case == "calls" else {**REPLY, **thought}
    seen = [result(1, "R1x")] if case == "calls" else [AGAIN]
    begun, whole = turns.begin([USER]), turns.begin([USER, reply, *seen])
    more = turns.bridge(seen, None)
    if more is None:
        return  # a new row
    text = turns.tokenizer.decode(more)
    goes_on = turns.tokenizer.decode(whole).endswith(text.rpartition(seen[0]["content"])[2])
    assert text.endswith(turns.reply_start) or goes_on, "in the same turn, after results"
    assert text.count(seen[0]["content"]) == 1
    if case == "turns":
        said = turns.encode("A1x")
        start = turns.tokenizer.decode(begun)
        kept = turns.tokenizer.decode(whole)
        before, _, after = kept.partition("A1x")
        assert text == after
        assert [*begun, *said, *more] == whole or start != before, "or it began otherwise"


@each_template
def test_after_results_the_policy_speaks_within_a_turn(name: str) -> None:
    """Whether the reply before said something beside its call, or had no content at all, makes no difference."""
    tokenizer = tokenizer_of(name)
    ends = set()
    for content in ({"content": ""}, {}, {"content": None}, {"content": "I look."}):
        called = {"role": "assistant", "tool_calls": [call(1)], **content}
        try:
            ids = encode_prompt(tokenizer, [{"role": "user", "content": "so?"}, called, result(1, "found 41")])
        except InputError:
            continue
        text = tokenizer.decode(ids)
        begun = tokenizer.decode(encode_prompt(tokenizer, [{"role": "user", "content": "so?"}]))
        turn = begun.rpartition("so?")[2]
        ends.add("turn" if text.endswith(turn) else text.rpartition("found 41")[2])
    assert len(ends - {"turn"}) <= 1
