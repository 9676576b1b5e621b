"""Which columns of a row are its prompt and its answer, where nobody says so."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxrl_llm.data.chat import is_conversation, preview
from jaxrl_llm.errors import InputError

# In order of preference; a name with a dot is an entry of a column.
PROMPTS = ("prompt", "question", "problem", "instruction", "input", "query", "messages")
ANSWERS = (
    "answer", "solution", "ground_truth", "final_answer", "target", "label", "reward_model.ground_truth",
    "extra_info.answer",
)  # fmt: skip


def prompt_column_of(row: Mapping[str, Any], where: str) -> str:
    """The column that holds the prompt. InputError, beginning with `where`, if the row has none of PROMPTS."""
    for name in PROMPTS:
        if name in row:
            return name
    raise InputError(
        f"{where}: no column is known to hold the prompt ({', '.join(PROMPTS)}); name one with --prompt-column "
        f"(prompt_column): {', '.join(sorted(row)) or 'there are no columns'}"
    )


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


def before_the_answer(messages: Any, where: str) -> tuple[Any, str | None]:
    """(the messages up to the last assistant's, which a policy is to write, and its text); other values unchanged.

    Only a conversation that ends with the assistant is cut. InputError if nothing is left of it.
    """
    if not is_conversation(messages) or messages[-1]["role"] != "assistant":
        return messages, None
    asked = list(messages[:-1])
    if not asked:
        raise InputError(f"{where}: the conversation has only an assistant's message, found {preview(messages)}")
    content = messages[-1]["content"]
    return asked, content if isinstance(content, str) else None


def chosen_line(source: str, row: Mapping[str, Any], prompt_column: str | None, answer_column: str | None) -> str:
    """What was chosen for a source, in one line; "" where the columns have the names that they need.

    >>> chosen_line("a.jsonl", {"question": "1 + 1?", "solution": "2"}, None, None)
    'a.jsonl: prompts are from the column question, answers from solution'
    """
    prompt = prompt_column or prompt_column_of(row, source)
    answer = answer_column or answer_column_of(row, prompt)
    if answer is None and before_the_answer(row.get(prompt), source)[1] is not None and prompt == "messages":
        answer = "the last message"
    if prompt == "prompt" and answer in ("answer", None):
        return ""
    said = "" if answer is None else f", answers from {answer}"
    return f"{source}: prompts are from the column {prompt}{said}"
