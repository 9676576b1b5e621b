"""Prompts to token ids, with a tokenizer of a few words and a chat template short enough to work out by hand."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jaxrl_llm.data import encode_prompt, is_conversation, prompt_text
from jaxrl_llm.errors import InputError

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
    assert encode_prompt(CHAT, messages) == [3, 5, 4, 6, 4]
    assert encode_prompt(CHAT, messages, system_prompt="be") == [2, 7, 3, 5, 4, 6, 4]
    own_system = [{"role": "system", "content": "brief"}, *messages]
    assert encode_prompt(CHAT, own_system, system_prompt="be") == [2, 8, 3, 5, 4, 6, 4]
    assert len(messages) == 2  # the caller's list is untouched
    with pytest.raises(InputError, match="needs a chat template"):
        encode_prompt(PLAIN, messages)


def test_what_the_template_rejects_is_an_input_error() -> None:
    with pytest.raises(InputError, match="roles user, tool: no tools"):
        encode_prompt(CHAT, [{"role": "user", "content": "hello"}, {"role": "tool", "content": "hello"}])


def test_token_ids_are_returned_as_they_are() -> None:
    ids = [5, 1, 6]
    assert encode_prompt(CHAT, ids, system_prompt="be") == ids
    assert encode_prompt(PLAIN, tuple(ids)) == ids


@pytest.mark.parametrize("prompt", [None, 3, [1.5], [1, "a"], [True], [-1], {"role": "user"}, [{"role": "user"}]])
def test_other_types_are_refused(prompt: object) -> None:
    with pytest.raises(InputError, match="a prompt is a string, a list of messages"):
        encode_prompt(CHAT, prompt)


def test_a_prompt_of_no_tokens_is_refused() -> None:
    with pytest.raises(InputError, match="empty prompt"):
        encode_prompt(CHAT, [])
    with pytest.raises(InputError, match="empty prompt"):
        encode_prompt(tokenizer("{{ messages[0]['content'] }}"), "")


def test_prompt_text_shows_special_tokens() -> None:
    assert prompt_text(CHAT, encode_prompt(CHAT, "hello there")).split() == ["<user>", "hello", "there", "<assistant>"]
