"""From a prompt, as data sets hold it, to token ids."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

from jaxrl_llm.errors import InputError
from jaxrl_llm.json_text import is_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MOST_CHARACTERS = 4_000_000  # of a prompt, about a million tokens: what is longer is a mistake, not a prompt
_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = _shorten.maxlong = 60


def is_conversation(prompt: Any) -> bool:
    """Whether the prompt is a list of messages, `[{"role": ..., "content": ...}, ...]`, with at least one of them."""
    return (
        isinstance(prompt, list | tuple)
        and len(prompt) > 0
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt)
    )


def fault_of(prompt: Any) -> str | None:
    """What makes a string or a conversation unfit to be a prompt, on one line; None where nothing does.

    A message's role is text; its content is text, or a list of parts `{"type": "text", "text": ...}`, or None beside
    "tool_calls". No text has half of a surrogate pair, and all of it together has at most `MOST_CHARACTERS`.
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
        return 'it has half of a surrogate pair, such as "\\ud800", which is no character that a tokenizer takes'
    if (length := sum(map(len, texts))) > MOST_CHARACTERS:
        return f"it has {length:,} characters, more than the {MOST_CHARACTERS:,} that a prompt may have"
    return None


def encode_prompt(tokenizer: PreTrainedTokenizerFast, prompt: Any, *, system_prompt: str | None = None) -> list[int]:
    """The token ids after which the policy starts to write.

    prompt: a list of token ids (0 to 2^31 - 1), returned as it is; or a list of messages, which goes through the
        tokenizer's chat template up to where the assistant speaks; or a string, which is one user message if there is
        a chat template and else plain text (with the special tokens, such as BOS, that the tokenizer itself puts
        around text).
    system_prompt: goes in front of the messages, unless they have a system message of their own.

    Raises InputError for any other type, for what `fault_of` finds, for a prompt of no tokens, for messages or a
    system prompt without a chat template, and for messages that the chat template rejects.
    """
    if system_prompt is not None and (not isinstance(system_prompt, str) or not is_unicode(system_prompt)):
        raise InputError(f"the system prompt is {preview(system_prompt)}, but must be text")
    if not isinstance(prompt, str) and not is_conversation(prompt):
        ids = _token_ids(prompt)
    elif fault := fault_of(prompt):
        raise InputError(f"prompt {preview(prompt)}: {fault}")
    elif not callable(tokenizer):
        raise InputError(f"the tokenizer is {preview(tokenizer)}: pass that of load_policy, or prompts of token ids")
    elif getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        ids = _apply_template(tokenizer, messages, system_prompt)
    elif not isinstance(prompt, str):
        raise InputError("a prompt of messages needs a chat template, and this tokenizer has none: use plain text")
    elif system_prompt is not None:
        raise InputError("a system prompt needs a chat template, and this tokenizer has none: put it in the prompt")
    else:
        ids = tokenizer(prompt)["input_ids"]
    if not ids:
        raise InputError(f"empty prompt: {preview(prompt)} has no tokens, and the policy needs one to start from")
    return ids


def prompt_text(tokenizer: PreTrainedTokenizerFast, ids: Sequence[int]) -> str:
    """The text of token ids as the policy sees it, special tokens included. InputError for what is no list of ids."""
    try:
        whole = [int(token) for token in ids]
        text = tokenizer.decode(whole, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"token ids are whole numbers from 0, found {preview(ids)}") from None
    assert isinstance(text, str)  # a list only for a batch of sequences
    return text


def preview(value: Any) -> str:
    """A value of any kind and size for a message: None, or its type and the beginning of it, on one line."""
    if value is None:
        return "None"
    if isinstance(value, Sequence) and not value:
        return f"an empty {type(value).__name__}"
    try:
        text = " ".join(_shorten.repr(value).split())[:120]
    except Exception:  # numbers of more digits than Python shows, and values that cannot be shown at all
        text = ""
    return f"{type(value).__name__} {text}".strip()


def _apply_template(
    tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], system_prompt: str | None
) -> list[int]:
    if system_prompt is not None and not any(message["role"] == "system" for message in messages):
        messages = [{"role": "system", "content": system_prompt}, *messages]
    try:
        ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    except Exception as error:  # a template is a program that came with the model
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
