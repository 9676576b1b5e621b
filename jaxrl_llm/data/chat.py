"""Encode a prompt of a data set as token ids."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.json_text import is_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MOST_CHARACTERS = 4_000_000  # of a prompt, about a million tokens: anything longer is a mistake
_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = _shorten.maxlong = 60


def is_conversation(prompt: Any) -> bool:
    """Whether the prompt is a non-empty list of messages, `[{"role": ..., "content": ...}, ...]`."""
    return (
        isinstance(prompt, list | tuple)
        and len(prompt) > 0
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt)
    )


def fault_of(prompt: Any) -> str | None:
    """Why a string or a conversation is not a valid prompt, in one line; None if it is valid.

    A message's role must be text. Its content must be text, a list of parts `{"type": "text", "text": ...}`, or None
    if there are "tool_calls". Texts must not contain unpaired surrogates, and have at most `MOST_CHARACTERS` together.
    """
    texts = [prompt] if isinstance(prompt, str) else []
    for number, message in enumerate([] if texts else prompt, start=1):
        role, content = message["role"], message["content"]
        if not isinstance(role, str) or not role:
            return f"message {number}: its role is {preview(role)}, but must be text, such as 'user'"
        if isinstance(content, list | tuple) and content and all(map(_is_text_part, content)):
            texts += [part["text"] for part in content]
        elif isinstance(content, str):
            texts.append(content)
        elif content is not None or not message.get("tool_calls"):
            return f"message {number}: its content is {preview(content)}, but must be text"
        texts.append(role)
    if not all(map(is_unicode, texts)):
        return 'it contains an unpaired surrogate, such as "\\ud800", which tokenizers do not accept'
    if (length := sum(map(len, texts))) > MOST_CHARACTERS:
        return f"it has {length:,} characters, but at most {MOST_CHARACTERS:,} are allowed"
    return None


def encode_prompt(tokenizer: PreTrainedTokenizerFast, prompt: Any, *, system_prompt: str | None = None) -> list[int]:
    """The token ids of a prompt, after which the policy starts to generate.

    prompt: a list of token ids (0 to 2^31 - 1), returned as it is; or a list of messages, formatted with the
        tokenizer's chat template including its generation prompt; or a string, which is a single user message if there
        is a chat template, else plain text (with the special tokens, such as BOS, that the tokenizer adds).
    system_prompt: prepended to the messages, unless they contain a system message.

    Raises InputError for any other type, for an invalid prompt (see `fault_of`), for a prompt without tokens, for
    messages or a system prompt without a chat template, and for messages that the chat template rejects.
    """
    if system_prompt is not None and (not isinstance(system_prompt, str) or not is_unicode(system_prompt)):
        raise InputError(f"the system prompt is {preview(system_prompt)}, but must be text")
    if not isinstance(prompt, str) and not is_conversation(prompt):
        ids = _token_ids(prompt)
    elif fault := fault_of(prompt):
        raise InputError(f"prompt {preview(prompt)}: {fault}")
    elif not callable(tokenizer):
        raise InputError(f"the tokenizer is {preview(tokenizer)}: pass the one of load_policy, or token ids as prompts")
    elif getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        ids = _apply_template(tokenizer, messages, system_prompt)
    elif not isinstance(prompt, str):
        raise InputError("a prompt of messages needs a chat template, but this tokenizer has none: use plain text")
    elif system_prompt is not None:
        raise InputError("a system prompt needs a chat template, but this tokenizer has none: put it in the prompt")
    else:
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise InputError(f"empty prompt: {preview(prompt)} has no tokens, but at least one is needed")
    return ids


def prompt_text(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    """The text of token ids, including special tokens. InputError for another value than a list of token ids."""
    try:
        whole = [int(token) for token in ids]
        text = tokenizer.decode(whole, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"token ids are whole numbers from 0, found {preview(ids)}") from None
    assert isinstance(text, str)  # a list only for a batch of sequences
    return text


def preview(value: Any) -> str:
    """A short description of any value for an error: None, or its type and the beginning of its repr, in one line."""
    if value is None:
        return "None"
    if isinstance(value, Sequence) and not value:
        return f"an empty {type(value).__name__}"
    try:
        text = " ".join(_shorten.repr(value).split())[:120]
    except Exception:  # ints with more digits than Python converts, and values without a working repr
        text = ""
    return f"{type(value).__name__} {text}".strip()


def _apply_template(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], system_prompt: str | None
) -> list[int]:
    if system_prompt is not None and not any(message["role"] == "system" for message in messages):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    try:
        ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    except Exception as error:  # a chat template is a program and can raise anything
        roles = ", ".join(str(message["role"]) for message in messages[:20])
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise InputError(f"the chat template rejects messages with the roles {roles}: {reason}") from error
    return [int(token) for token in ids]


def _token_ids(prompt: Any) -> list[int]:
    if not isinstance(prompt, list | tuple) or not all(_is_token_id(entry) for entry in prompt):
        raise InputError(
            "a prompt is a string, a list of messages (role, content) or a list of token ids (0 to 2^31 - 1); "
            f"found {preview(prompt)}"
        )
    return [int(entry) for entry in prompt]


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


def _is_token_id(entry: Any) -> bool:
    return isinstance(entry, Integral) and not isinstance(entry, bool) and 0 <= int(entry) < 2**31
