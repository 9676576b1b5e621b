"""Encode a prompt of a data set as token ids."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from numbers import Integral
from typing import TYPE_CHECKING, Any

from jaxrl_llm.data.chat.inert import control_tokens, encode, guarded
from jaxrl_llm.data.chat.message_forms import conversation_text
from jaxrl_llm.data.chat.messages import text_of_content, without_none
from jaxrl_llm.data.chat.rendering import PromptFormat, Rendering
from jaxrl_llm.utils.errors import InputError
from jaxrl_llm.utils.json import is_unicode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MOST_CHARACTERS = 4_000_000  # of a prompt, about a million tokens: anything longer is a mistake
_shorten = reprlib.Repr()
_shorten.maxstring = _shorten.maxother = _shorten.maxlong = 60


def is_conversation(prompt: Any) -> bool:
    """Whether the prompt is a non-empty list of messages, `[{"role": ..., "content": ...}, ...]`.

    A message that calls tools may have no content.
    """
    if not isinstance(prompt, list | tuple) or not prompt:
        return False
    return all(isinstance(x, dict) and "role" in x and ("content" in x or x.get("tool_calls")) for x in prompt)


def whole_text(row: Mapping[str, Any]) -> str | None:
    """The text of a row that is a whole text, its `completion`, where its prompt is []; None for other rows."""
    text = row.get("completion") if row.get("prompt") == [] else None
    return text if isinstance(text, str) else None


def fault_of(prompt: Any) -> str | None:
    """Why a string or a conversation is not a valid prompt, in one line; None if it is valid.

    A message's role must be text. Its content must be text, a list of parts `{"type": "text", "text": ...}`, or None
    if there are "tool_calls". Texts must not contain unpaired surrogates, and have at most `MOST_CHARACTERS` together.
    """
    texts = [prompt] if isinstance(prompt, str) else []
    for number, message in enumerate([] if texts else prompt, start=1):
        role, content = message["role"], message.get("content")
        if not isinstance(role, str) or not role:
            return f"message {number}: its role is {preview(role)}, but must be text, such as 'user'"
        parts = content if isinstance(content, list | tuple) else ()
        said: list[Any] = [one.get("text") for one in parts if isinstance(one, dict) and one.get("type") == "text"]
        if parts and len(said) == len(parts) and all(isinstance(text, str) for text in said):
            texts += said
        elif isinstance(content, str):
            texts.append(content)
        elif content is not None or not message.get("tool_calls"):
            kinds = {str(part.get("type")) for part in parts if isinstance(part, Mapping)} - {"text", "None"}
            what = f" (of the role {role}, with a part of type {', '.join(sorted(kinds))})" if kinds else ""
            return f"message {number}: its content is {preview(content)}{what}, but must be text"
        texts.append(role)
    if not all(map(is_unicode, texts)):
        return 'it contains an unpaired surrogate, such as "\\ud800", which tokenizers do not accept'
    if (length := sum(map(len, texts))) > MOST_CHARACTERS:
        return f"it has {length:,} characters, but at most {MOST_CHARACTERS:,} are allowed"
    return None


def encode_prompt(
    tokenizer: PreTrainedTokenizerFast,
    prompt: Any,
    *,
    system_prompt: str | None = None,
    format: PromptFormat | None = None,
    row: Mapping[str, Any] | None = None,
    dialect: bool = False,
) -> list[int]:
    """The token ids of a prompt, after which the policy starts to generate.

    prompt: a list of token ids (0 to 2^31 - 1), returned as it is; or a list of messages, formatted with the
        tokenizer's chat template including its generation prompt, or up to the end of a last message of the assistant,
        which is continued; or a string, which is a single user message if there is a chat template, else plain text
        (with the special tokens, such as BOS, that the tokenizer adds). Texts never yield control tokens, but those of
        the assistant's messages do. [] is the beginning of a row that is a whole text: the first token of its column
        `completion`, which is BOS where the tokenizer adds it.
    system_prompt: prepended to the messages, unless they contain a system message.
    format: a string may be plain or rendered text instead, and the chat template may have options.
    row: of the data set, whose columns `tools` (JSON schemas) and `chat_template_kwargs` the chat template gets.
    dialect: messages without a chat template are written in `rendering.DIALECT`, as those of environments are.

    Raises InputError for any other type, for an invalid prompt (see `fault_of`), for a prompt without tokens, for
    messages or a system prompt without a chat template or in another format, for options that the chat template does
    not read, and for messages that it rejects or leaves out.
    """
    format = PromptFormat() if format is None else format
    if not isinstance(format, PromptFormat):
        raise InputError(f"format is {preview(format)}, but must be a PromptFormat, such as PromptFormat('plain')")
    if system_prompt is not None and (not isinstance(system_prompt, str) or not is_unicode(system_prompt)):
        raise InputError(f"the system prompt is {preview(system_prompt)}, but must be text")
    whole = whole_text({**(row or {}), "prompt": prompt})
    if whole is not None:
        if system_prompt is not None:
            raise InputError("the row is a whole text, which has no place for a system prompt: leave it out")
        ids = encode_plain(tokenizer, whole)[:1]
    elif not isinstance(prompt, str) and not is_conversation(prompt):
        ids = _token_ids(prompt)
    elif fault := fault_of(prompt):
        raise InputError(f"prompt {preview(prompt)}: {fault}")
    elif not callable(tokenizer):
        raise InputError(f"the tokenizer is {preview(tokenizer)}: pass the one of load_policy, or token ids as prompts")
    elif (has_chat_template(tokenizer) and format.kind == "chat") or (
        dialect and not (isinstance(prompt, str) and prompt)
    ):
        if not has_chat_template(tokenizer):
            format = replace(format, kind="plain")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if system_prompt is not None and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": system_prompt}, *messages]
        rendering = Rendering(tokenizer, row_tools(row or {}), row_format(format, row or {}))
        rendering.check_options(format.options)  # a row's own may be for other models
        ids = rendering.encode(conversation_text(rendering, messages))
    elif not isinstance(prompt, str):
        why = "this tokenizer has none" if format.kind == "chat" else f"the prompt format is {format.kind}"
        remedy = "use plain text" + (", or set its chat_template" if format.kind == "chat" else "")
        raise InputError(f"a prompt of messages needs a chat template, but {why}: {remedy}")
    elif system_prompt is not None:
        why = "this tokenizer has none" if format.kind == "chat" else f"the prompt format is {format.kind}"
        raise InputError(f"a system prompt needs a chat template, but {why}: put it in the prompt")
    else:
        ids = encode_rendered(tokenizer, prompt) if format.kind == "rendered" else encode_plain(tokenizer, prompt)
    if not ids:
        raise InputError(f"empty prompt: {preview(prompt)} has no tokens, but at least one is needed")
    return ids


def encode_plain(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a text with the special tokens that the tokenizer adds; none that the text holds."""
    control = control_tokens(tokenizer)
    safe = guarded(text, control)
    if safe == text:
        return [int(one) for one in tokenizer(text)["input_ids"]]
    first, last = _added(tokenizer)
    return [*first, *encode(tokenizer, safe, control), *last]


def encode_rendered(tokenizer: Any, text: str) -> list[int]:
    """The token ids of a text that a chat template wrote, whose control tokens are what they are.

    If it lacks the BOS token that its chat template writes, or, without a chat template, the tokenizer adds, it begins
    with that; it never has two.
    """
    ids = [int(one) for one in tokenizer(text, add_special_tokens=False)["input_ids"]]
    first: Sequence[int] = _added(tokenizer)[0]
    if has_chat_template(tokenizer):
        bos = getattr(tokenizer, "bos_token", None)
        begun = Rendering(tokenizer).render([{"role": "user", "content": "x"}])
        first = [int(tokenizer.bos_token_id)] if bos and begun.startswith(bos) else []
    return ids if ids[: len(first)] == list(first) else [*first, *ids]


def has_chat_template(tokenizer: Any) -> bool:
    """Whether conversations have a format."""
    return bool(getattr(tokenizer, "chat_template", None))


def is_rendered(tokenizer: Any, prompt: Any) -> bool:
    """Whether a prompt begins with a control token, as one that a chat template wrote."""
    if is_conversation(prompt):
        prompt = text_of_content(prompt[0]["content"])
    begun = prompt.lstrip() if isinstance(prompt, str) else ""
    return bool(begun) and has_chat_template(tokenizer) and begun.startswith(control_tokens(tokenizer))


def format_notes(tokenizer: Any, rows: Sequence[Mapping[str, Any]], format: PromptFormat) -> list[str]:
    """What is odd about the format of these rows, a line each."""
    notes = []
    chat = format.kind == "chat" and has_chat_template(tokenizer)
    count = sum(is_rendered(tokenizer, row.get("prompt")) for row in rows) if chat else 0
    if count:
        notes.append(
            f"{count} of {len(rows)} prompts begin with a control token, as if a chat template had written them: it is "
            "ordinary text within the chat template; --prompt-format rendered reads it as such"
        )
    with_tools = [row for row in rows if row.get("tools")]
    if with_tools and not any(map(row_tools, with_tools)):
        notes.append("the column tools is not used: it holds no JSON schemas of tools")
    elif with_tools and not (chat and any(Rendering(tokenizer, row_tools(row)).shows_tools for row in with_tools[:1])):
        why = "there is no chat template" if not chat else "the chat template describes no tools"
        notes.append(f"the column tools is not used: {why}")
    if not chat and any(row.get("chat_template_kwargs") for row in rows):
        notes.append("the column chat_template_kwargs is not used: there is no chat template")
    return notes


def row_format(format: PromptFormat, row: Mapping[str, Any]) -> PromptFormat:
    """The format of a row's prompt, with the row's own `chat_template_kwargs`. InputError for what is no mapping."""
    own = parsed_json(row.get("chat_template_kwargs"))
    if not own:
        return format
    if not isinstance(own, Mapping):
        raise InputError(f"chat_template_kwargs is {preview(own)}, but must be an object of the template's options")
    known = {name: value for name, value in own.items() if value is not None}
    return replace(format, options={**format.options, **known})


def row_tools(row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The JSON schemas in a row's column `tools`, which may be JSON text; () where it holds none.

    Entries that are None are left out, with which Arrow fills up the structs of a column.
    """
    found = parsed_json(row.get("tools"))
    found = [parsed_json(one) for one in found] if isinstance(found, list | tuple) else []
    if not found or not all(isinstance(one, Mapping) and {"function", "name"} & one.keys() for one in found):
        return ()
    clean = [without_none(one) for one in found]
    return tuple(one if "function" in one else {"type": "function", "function": one} for one in clean)


def parsed_json(value: Any) -> Any:
    """What a text says that is JSON; other values, and other texts, as they are."""
    if isinstance(value, str):
        with suppress(ValueError):
            return json.loads(value)
    return value


def _added(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The tokens that the tokenizer puts before and after a text."""
    whole, bare = (list(tokenizer("x", add_special_tokens=more)["input_ids"]) for more in (True, False))
    place = next((n for n in range(len(whole)) if whole[n : n + len(bare)] == bare), 0)
    return whole[:place], whole[place + len(bare) :]


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


def _token_ids(prompt: Any) -> list[int]:
    if not isinstance(prompt, list | tuple) or not all(
        isinstance(one, Integral) and not isinstance(one, bool) and 0 <= int(one) < 2**31 for one in prompt
    ):
        raise InputError(
            "a prompt is a string, a list of messages (role, content) or a list of token ids (0 to 2^31 - 1); "
            f"found {preview(prompt)}"
        )
    return [int(entry) for entry in prompt]


def with_text(prompt: Any, text: str, first: bool) -> Any:
    """A prompt, a text or messages, with a text at an end of its last message; None for another prompt."""
    if isinstance(prompt, str):
        return text + prompt if first else prompt + text
    if not isinstance(prompt, Sequence) or not prompt or not isinstance(prompt[-1], Mapping):
        return None
    content: Any = prompt[-1].get("content") or ()
    if isinstance(content, str):
        return [*prompt[:-1], {**prompt[-1], "content": text + content if first else content + text}]
    said = [{"type": "text", "text": text}]
    return [*prompt[:-1], {**prompt[-1], "content": [*said, *content] if first else [*content, *said]}]
