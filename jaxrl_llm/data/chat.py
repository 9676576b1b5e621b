"""From a prompt, as data sets hold it, to token ids."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from jaxrl_llm.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def is_conversation(prompt: Any) -> bool:
    """Whether the prompt is a list of messages, `[{"role": ..., "content": ...}, ...]`, with at least one of them."""
    return (
        isinstance(prompt, list | tuple)
        and len(prompt) > 0
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt)
    )


def encode_prompt(tokenizer: PreTrainedTokenizerFast, prompt: Any, *, system_prompt: str | None = None) -> list[int]:
    """The token ids after which the policy starts to write.

    prompt: a list of token ids, returned as it is; or a list of messages, which goes through the tokenizer's chat
        template up to where the assistant speaks; or a string, which is one user message if there is a chat template
        and else plain text (with the special tokens, such as BOS, that the tokenizer itself puts around text).
    system_prompt: goes in front of the messages, unless they have a system message of their own.

    Raises InputError for any other type, for a prompt of no tokens, for messages or a system prompt without a chat
    template, and for messages that the chat template rejects.
    """
    if isinstance(prompt, str):
        if tokenizer.chat_template:
            ids = _apply_template(tokenizer, [{"role": "user", "content": prompt}], system_prompt)
        elif system_prompt is not None:
            raise InputError("a system prompt needs a chat template, and this tokenizer has none: put it in the prompt")
        else:
            ids = tokenizer(prompt)["input_ids"]
    elif is_conversation(prompt):
        if not tokenizer.chat_template:
            raise InputError("a prompt of messages needs a chat template, and this tokenizer has none: use plain text")
        ids = _apply_template(tokenizer, list(prompt), system_prompt)
    elif isinstance(prompt, list | tuple) and all(_is_token_id(entry) for entry in prompt):
        ids = [int(entry) for entry in prompt]
    else:
        raise InputError(
            f"a prompt is a string, a list of messages (role, content) or a list of token ids; found {_of(prompt)}"
        )
    if not ids:
        raise InputError(f"empty prompt: {_of(prompt)} has no tokens, and the policy needs one to start from")
    return ids


def prompt_text(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    """The text of token ids as the policy sees it, special tokens included."""
    text = tokenizer.decode(
        [int(token) for token in ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
    )
    assert isinstance(text, str)  # a list only for a batch of sequences
    return text


def _apply_template(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], system_prompt: str | None
) -> list[int]:
    from jinja2 import TemplateError

    if system_prompt is not None and not any(message["role"] == "system" for message in messages):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    try:
        ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    except TemplateError as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise InputError(f"the chat template rejects messages with the roles {roles}: {error}") from error
    return [int(token) for token in ids]


def _is_token_id(entry: Any) -> bool:
    return isinstance(entry, Integral) and not isinstance(entry, bool) and int(entry) >= 0


def _of(prompt: Any) -> str:
    shown = repr(prompt)
    return f"{type(prompt).__name__} {shown if len(shown) <= 80 else shown[:77] + '...'}"
