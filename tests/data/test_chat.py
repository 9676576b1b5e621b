"""Prompts to token ids, with a tokenizer of a few words and a chat template short enough to work out by hand."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.data import encode_prompt, is_conversation, prompt_text
from jaxrl_llm.data.chat import encode as chat
from jaxrl_llm.data.chat.encode import fault_of
from jaxrl_llm.data.chat.messages import plain_message
from jaxrl_llm.utils.errors import InputError

WORDS = ["<unk>", "<bos>", "<system>", "<user>", "<assistant>", "hello", "there", "be", "brief"]
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['role'] == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "<{{ message['role'] }}> {{ message['content'] }} "
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    ids = {word: index for index, word in enumerate(WORDS)}
    core = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    special = WORDS[1:5]
    return PreTrainedTokenizerFast(
        tokenizer_object=core, unk_token="<unk>", extra_special_tokens=special, chat_template=template
    )


CHAT, PLAIN = tokenizer(TEMPLATE), tokenizer(None)


def test_is_conversation() -> None:
    assert is_conversation([{"role": "user", "content": "hello"}])
    for other in ("hello", [], [1, 2], [{"role": "user"}], ["hello"], None, {"role": "user", "content": "hello"}):
        assert not is_conversation(other)


def test_a_string_is_one_user_message_where_there_is_a_chat_template() -> None:
    assert encode_prompt(CHAT, "hello there") == [3, 5, 6, 4]  # <user> hello there <assistant>
    assert encode_prompt(CHAT, "hello", system_prompt="be brief") == [2, 7, 8, 3, 5, 4]


def test_a_string_is_plain_text_where_there_is_none() -> None:
    assert encode_prompt(PLAIN, "hello there") == [1, 5, 6]
    with pytest.raises(InputError, match="a system prompt needs a chat template"):
        encode_prompt(PLAIN, "hello", system_prompt="be brief")


def test_messages_go_through_the_template() -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "there"}]
    messages += [{"role": "user", "content": "be"}]
    assert encode_prompt(CHAT, messages) == [3, 5, 4, 6, 3, 7, 4]
    assert encode_prompt(CHAT, messages, system_prompt="be") == [2, 7, 3, 5, 4, 6, 3, 7, 4]
    own_system = [{"role": "system", "content": "brief"}, *messages]
    assert encode_prompt(CHAT, own_system, system_prompt="be") == [2, 8, 3, 5, 4, 6, 3, 7, 4]
    assert len(messages) == 3  # the caller's list is untouched
    assert encode_prompt(CHAT, messages[:2]) == [3, 5, 4, 6], "a last reply is continued"
    with pytest.raises(InputError, match="needs a chat template"):
        encode_prompt(PLAIN, messages)


def test_what_the_template_rejects_is_an_input_error() -> None:
    with pytest.raises(InputError, match="roles user, tool: no tools"):
        encode_prompt(CHAT, [{"role": "user", "content": "hello"}, {"role": "tool", "content": "hello"}])


def test_token_ids_are_returned_as_they_are() -> None:
    ids = [5, 1, 6]
    assert encode_prompt(CHAT, ids, system_prompt="be") == ids
    assert encode_prompt(PLAIN, tuple(ids)) == ids


@pytest.mark.parametrize(
    "prompt",
    [None, 3, [1.5], [5.0], [1, "a"], [True], [-1], [2**31], [10**5000], {"role": "user"}, [{"role": "user"}], b"a"],
)
def test_other_types_are_refused(prompt: object) -> None:
    with pytest.raises(InputError, match="a prompt is a string, a list of messages"):
        encode_prompt(CHAT, prompt)


def test_a_prompt_of_no_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="empty prompt"):
        encode_prompt(CHAT, [])
    with pytest.raises(InputError, match="empty prompt"):
        encode_prompt(tokenizer("{{ messages[0]['content'] }}"), "")


@pytest.mark.parametrize(
    "message, reason",
    [
        ({"role": None, "content": "hello"}, "message 2: its role is None, but must be text"),
        ({"role": 3, "content": "hello"}, "message 2: its role is int 3"),
        ({"role": "", "content": "hello"}, "message 2: its role is an empty str"),
        ({"role": "user", "content": None}, "message 2: its content is None, but must be text"),
        ({"role": "user", "content": 3}, "message 2: its content is int 3"),
        ({"role": "user", "content": {"text": "hello"}}, "message 2: its content is dict"),
        ({"role": "user", "content": []}, "message 2: its content is an empty list"),
        ({"role": "user", "content": ["hello"]}, "message 2: its content is list"),
        ({"role": "user", "content": [{"type": "image", "image": "x"}]}, "message 2: its content is list"),
        ({"role": "user", "content": "hello \ud800"}, "an unpaired surrogate"),
        ({"role": "\udfff", "content": "hello"}, "an unpaired surrogate"),
        ({"role": "user", "content": [{"type": "text", "text": "\ud800"}]}, "an unpaired surrogate"),
    ],
)
def test_messages_of_other_types_are_refused(message: dict, reason: str) -> None:
    with pytest.raises(InputError, match=reason) as caught:
        encode_prompt(CHAT, [{"role": "user", "content": "hello"}, message])
    str(caught.value).encode("utf-8")


def test_a_message_that_calls_tools_needs_no_content() -> None:
    called = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    assert is_conversation([{"role": "user", "content": "a"}, called])
    assert not is_conversation([{"role": "assistant", "tool_calls": []}])
    for content in ({}, {"content": None}, {"content": ""}):
        assert fault_of([{**called, **content}]) is None
        assert plain_message({**called, **content})["content"] == ""


def test_messages_that_chat_templates_know() -> None:
    called = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add", "arguments": {}}}]}
    answered = {"role": "tool", "content": "", "tool_call_id": "1"}
    parts = {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]}
    for messages in ([called], [parts, called, answered], [{"role": "user", "content": ""}]):
        assert fault_of(messages) is None
    assert encode_prompt(CHAT, [{"role": "user", "content": ""}]) == [3, 4]


def test_text_that_no_tokenizer_takes_is_refused() -> None:
    for encode in (CHAT, PLAIN):
        with pytest.raises(InputError, match="an unpaired surrogate"):
            encode_prompt(encode, "hello \ud800")
    for system in (3, ["be brief"], "\ud800"):
        with pytest.raises(InputError, match=r"the system prompt is .*, but must be text"):
            encode_prompt(CHAT, "hello", system_prompt=system)  # type: ignore[arg-type]


def test_a_prompt_without_bounds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MOST_CHARACTERS", 11)
    assert encode_prompt(PLAIN, "hello there") == [1, 5, 6]
    with pytest.raises(InputError, match="it has 12 characters, but at most 11"):
        encode_prompt(PLAIN, "hello there ")
    with pytest.raises(InputError, match="it has 12 characters"):
        encode_prompt(CHAT, [{"role": "user", "content": "be"}, {"role": "user", "content": "be"}])


def test_without_a_tokenizer_only_token_ids_work() -> None:
    assert encode_prompt(None, [1, 2]) == [1, 2]  # type: ignore[arg-type]
    for prompt in ("hello", [{"role": "user", "content": "hello"}]):
        with pytest.raises(InputError, match="the tokenizer is None: pass the one of load_policy"):
            encode_prompt(None, prompt)  # type: ignore[arg-type]


def test_a_template_that_fails_in_any_way_is_one_line() -> None:
    for template in (
        "{{ messages[0]['content'] + 1 }}",
        "{{ messages.x.y }}",
        "{% for m in 3 %}{% endfor %}",
        "{% if %}",
    ):
        with pytest.raises(InputError, match="the chat template rejects messages with the roles user: ") as caught:
            encode_prompt(tokenizer(template), "hello")
        assert "\n" not in str(caught.value)


def test_an_error_shows_little_of_a_huge_prompt() -> None:
    loop: list = []
    loop.append(loop)
    for prompt in ([1.5] * 10**6, loop, [{"role": "user", "content": {"x": "y" * 10**6}}]):
        with pytest.raises(InputError) as caught:
            encode_prompt(CHAT, prompt)
        assert len(str(caught.value)) < 400


def test_prompt_text_shows_special_tokens() -> None:
    assert prompt_text(CHAT, encode_prompt(CHAT, "hello there")).split() == ["<user>", "hello", "there", "<assistant>"]
