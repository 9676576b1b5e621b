"""Which columns of a row are its prompt, its choices and its answer, where nobody says so."""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.data.chat.encode import is_conversation, preview
from jaxrl_llm.data.preference_rows import is_implicit, with_prompt
from jaxrl_llm.utils.errors import InputError, shown

# In order of preference; a name with a dot is an entry of a column.
CONVERSATIONS = ("messages", "conversations", "conversation")
PROMPTS = ("prompt", "question", "problem", "instruction", "input", "query", *CONVERSATIONS)
TEXT = "text"  # of rows without a prompt
CHOICES = ("choices", "options")
ANSWERS = (
    "answer", "expected_answer", "solution", "ground_truth", "final_answer", "correct_answer", "target", "answerKey",
    "answer_index", "label", "reward_model.ground_truth", "extra_info.answer", "output",
)  # fmt: skip
# Who speaks in conversations of ShareGPT's kind, [{"from": ..., "value": ...}].
_SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool",
}  # fmt: skip


class Found(NamedTuple):
    """The prompt of a row and what else its columns were found to hold."""

    prompt: Any
    """[] of a row that is a whole text, which is its "completion"."""
    answer: dict[str, Any]
    """{"answer": value}, or {} where the row has none, or has it under that name; the responses after their prompt,
    which is the last message of a conversation, "completion"."""
    said: str
    """Which columns they are, for a line; "" where they have the names that they need."""


def find(row: Mapping[str, Any], where: str, prompt_column: str | None, answer_column: str | None) -> Found:
    """Find the prompt and the answer of a row.

    prompt_column, answer_column: as the user named them; None: the first that there is of `PROMPTS` and `ANSWERS`.

    Where nobody named the prompt: the column `input` follows an `instruction`; choices follow their question, one a
    line with its letter, and the answer is the letter of the right one; of a conversation that ends with the assistant,
    the last message is the completion, and its text the answer. Conversations of ShareGPT's kind become messages.

    Raises InputError, which begins with `where`, for a row without such a column, and for speakers, choices and answers
    to them that cannot be read.
    """
    if prompt_column is None and is_implicit(row):
        own = with_prompt(row, where)
        return Found(own.pop("prompt"), own, "prompts are what chosen and rejected both begin with")
    if prompt_column is None and isinstance(row.get(TEXT), str) and not any(name in row for name in PROMPTS):
        return Found([], {"completion": row[TEXT]}, f"rows are whole texts, from the column {TEXT}")
    column = prompt_column or prompt_column_of(row, where)
    prompt, named = as_messages(row[column], where), column
    answer = answer_column or answer_column_of(row, column)
    found = {} if answer in (None, "answer") else {"answer": value_of(row, str(answer))}
    from_answer = answer
    if prompt_column is not None:
        return Found(prompt, found, _said(named, from_answer))
    if column in CONVERSATIONS:
        prompt, last = before_the_answer(prompt, where)
        if last is not None and answer is None and isinstance(last.get("content"), str):
            found, from_answer = {"answer": last["content"]}, "the last message"
        if last is not None:
            found = {"completion": [dict(last)], **found}
    elif column == "instruction" and isinstance(more := row.get("input"), str) and more.strip():
        prompt, named = f"{prompt}\n\n{more}", "instruction and input"
    choices = next((name for name in CHOICES if isinstance(row.get(name), list | tuple | Mapping) and row[name]), None)
    if choices is not None and isinstance(prompt, str):
        lettered = _lettered(row[choices], f"{where}: {choices}")
        prompt = "\n".join([f"{prompt}\n", *(f"{letter}. {text}" for letter, text in lettered.items())])
        named = f"{named} with {choices} by letter"
        if answer is not None:
            found = {"answer": _letter_of(value_of(row, answer), lettered, f"{where}: {answer}")}
            from_answer = f"{answer}, as a letter"
    return Found(prompt, found, _said(named, from_answer))


def _said(prompt: str, answer: str | None) -> str:
    if prompt == "prompt" and answer in ("answer", None):
        return ""
    columns = "columns" if " and " in prompt else "column"
    return f"prompts are from the {columns} {prompt}" + ("" if answer is None else f", answers from {answer}")


def prompt_column_of(row: Mapping[str, Any], where: str) -> str:
    """The column that holds the prompt. InputError, beginning with `where`, if the row has none of PROMPTS."""
    for name in PROMPTS:
        if name in row:
            return name
    raise InputError(
        f"{where}: no column is known to hold the prompt ({', '.join(PROMPTS)}): name one with --prompt-column "
        "(prompt_column), or write the prompt from columns with --prompt-template (prompt_template), such as "
        f"'{_example(row)}'; the columns are: {', '.join(sorted(row)) or 'none'}"
    )


def _example(row: Mapping[str, Any]) -> str:
    """A template of a row's columns, for an error.

    >>> _example({"target": 9, "nums": [4, 5]})
    'nums {nums}, target {target}'
    """
    names = [name for name in sorted(row) if name.isidentifier()][:2] or ["COLUMN"]
    return ", ".join(f"{name} {{{name}}}" for name in names)


def answer_column_of(row: Mapping[str, Any], prompt_column: str) -> str | None:
    """The column, or entry of a column, that holds the answer; None if the row has none of ANSWERS.

    >>> answer_column_of({"prompt": "a", "reward_model": {"ground_truth": "4"}}, "prompt")
    'reward_model.ground_truth'
    """
    return next((name for name in ANSWERS if name != prompt_column and has(row, name)), None)


def has(row: Mapping[str, Any], name: str) -> bool:
    """Whether a row has a column, or an entry of one ("reward_model.ground_truth")."""
    outer, dot, inner = name.partition(".")
    return name in row or bool(dot and isinstance(row.get(outer), Mapping) and inner in row[outer])


def value_of(row: Mapping[str, Any], name: str) -> Any:
    """The value of a column, or of an entry of one; None where there is none."""
    if name in row:
        return row[name]
    outer, _, inner = name.partition(".")
    return row[outer].get(inner) if isinstance(row.get(outer), Mapping) else None


def as_messages(prompt: Any, where: str) -> Any:
    """Messages of a conversation of ShareGPT's kind, `[{"from": "human", "value": ...}]`; other values unchanged.

    Raises InputError, which begins with `where`, for a speaker that is not known.
    """
    kind = isinstance(prompt, list | tuple) and prompt and all(isinstance(one, Mapping) for one in prompt)
    if not kind or not all({"from", "value"} <= one.keys() for one in prompt):
        return prompt
    for one in prompt:
        if one["from"] not in _SPEAKERS:
            raise InputError(
                f"{where}: a message is from {shown(one['from'])}, which is none of {', '.join(_SPEAKERS)}"
            )
    return [{"role": _SPEAKERS[one["from"]], "content": one["value"]} for one in prompt]


def before_the_answer(messages: Any, where: str) -> tuple[Any, Mapping[str, Any] | None]:
    """(the messages up to the last assistant's, which a policy is to write, and that one); other values unchanged.

    Only a conversation that ends with the assistant is cut. InputError if nothing is left of it.
    """
    if not is_conversation(messages) or messages[-1]["role"] != "assistant":
        return messages, None
    asked = list(messages[:-1])
    if not asked:
        raise InputError(f"{where}: the conversation has only an assistant's message, found {preview(messages)}")
    return asked, messages[-1]


def _lettered(choices: Any, where: str) -> dict[str, str]:
    """Choices by label: A, B, C ... of a list; their own of {"text": [...], "label": [...]} and of a dict by label."""
    texts: Any = choices
    labels: Sequence[Any] = string.ascii_uppercase
    if isinstance(choices, Mapping) and {"text", "label"} <= choices.keys():
        texts, labels = choices["text"], choices["label"]
    elif isinstance(choices, Mapping):
        known = {label: text for label, text in choices.items() if text is not None}  # Arrow fills in the others
        texts, labels = list(known.values()), list(known)
    right = isinstance(texts, list | tuple) and all(isinstance(one, str | int | float) for one in texts)
    if not right or not 2 <= len(texts) <= len(labels):
        raise InputError(
            f"{where} is {preview(choices)}, but must be a list of 2 to 26 texts: write the prompt with "
            "--prompt-column or --prompt-template (prompt_template)"
        )
    return {str(label): str(text) for label, text in zip(labels, texts, strict=False)}


def _letter_of(answer: Any, lettered: Mapping[str, str], where: str) -> str:
    """The label of an answer, which is a label, a number from 0, or a choice's text."""
    labels = list(lettered)
    if isinstance(answer, str) and (label := answer.strip().strip("().")) in lettered:
        return label
    if isinstance(answer, str) and list(lettered.values()).count(answer) == 1:
        return labels[list(lettered.values()).index(answer)]
    number = int(answer) if isinstance(answer, str) and answer.strip().isdecimal() else answer
    if isinstance(number, int) and not isinstance(number, bool) and 0 <= number < len(labels):
        return labels[number]
    raise InputError(
        f"{where} is {preview(answer)}, which is none of the choices {', '.join(labels)}: name another column with "
        "--answer-column, or write the prompt with --prompt-template (prompt_template)"
    )
