"""Which columns of a row are its prompt, its choices and its answer, where nobody says so.

Of preference data the prompt may be the common beginning of two responses, and some rows teach nothing.
"""

import string
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from jaxrl_llm.data.chat.encode import is_conversation, preview
from jaxrl_llm.data.chat.messages import without_none
from jaxrl_llm.utils.errors import InputError, several, shown

CHOSEN, REJECTED, COMPLETION, LABEL = "chosen", "rejected", "completion", "label"

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


class PromptColumns(NamedTuple):
    """The prompt of a row and what else its columns were found to hold."""

    prompt: Any  # [] of a row that is a whole text, which is its "completion"
    answer: dict[str, Any]
    """{"answer": value}, or {} where the row has none, or has it under that name; the responses after their prompt,
    which is the last message of a conversation, "completion"."""
    said: str  # which columns they are, for a line; "" where they have the names that they need


def find(row: Mapping[str, Any], where: str, prompt_column: str | None, answer_column: str | None) -> PromptColumns:
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
        return PromptColumns(own.pop("prompt"), own, "prompts are what chosen and rejected both begin with")
    if prompt_column is None and isinstance(row.get(TEXT), str) and not any(name in row for name in PROMPTS):
        return PromptColumns([], {"completion": row[TEXT]}, f"rows are whole texts, from the column {TEXT}")
    column = prompt_column or prompt_column_of(row, where)
    prompt, named = as_messages(row[column], where), column
    answer = answer_column or next((name for name in ANSWERS if name != column and has(row, name)), None)
    found = {} if answer in (None, "answer") else {"answer": _value_of(row, str(answer))}
    from_answer = answer
    if prompt_column is not None:
        return PromptColumns(prompt, found, _said(named, from_answer))
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
            found = {"answer": _letter_of(_value_of(row, answer), lettered, f"{where}: {answer}")}
            from_answer = f"{answer}, as a letter"
    return PromptColumns(prompt, found, _said(named, from_answer))


def _said(prompt: str, answer: str | None) -> str:
    if prompt == "prompt" and answer in ("answer", None):
        return ""
    columns = "columns" if " and " in prompt else "column"
    return f"prompts are from the {columns} {prompt}" + ("" if answer is None else f", answers from {answer}")


def prompt_column_of(row: Mapping[str, Any], where: str) -> str:
    """The column that holds the prompt. InputError, beginning with `where`, if the row has none of PROMPTS."""
    if found := next((name for name in PROMPTS if name in row), None):
        return found
    names = [name for name in sorted(row) if name.isidentifier()][:2] or ["COLUMN"]
    raise InputError(
        f"{where}: no column is known to hold the prompt ({', '.join(PROMPTS)}): name one with --prompt-column "
        "(prompt_column), or write the prompt from columns with --prompt-template (prompt_template), such as "
        f"'{', '.join(f'{name} {{{name}}}' for name in names)}'; the columns are: {', '.join(sorted(row)) or 'none'}"
    )


def has(row: Mapping[str, Any], name: str) -> bool:
    """Whether a row has a column, or an entry of one ("reward_model.ground_truth")."""
    outer, dot, inner = name.partition(".")
    return name in row or bool(dot and isinstance(row.get(outer), Mapping) and inner in row[outer])


def _value_of(row: Mapping[str, Any], name: str) -> Any:
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
    for speaker in (one["from"] for one in prompt):
        if speaker not in _SPEAKERS:
            raise InputError(f"{where}: a message is from {shown(speaker)}, which is none of {', '.join(_SPEAKERS)}")
    return [{"role": _SPEAKERS[one["from"]], "content": one["value"]} for one in prompt]


def before_the_answer(messages: Any, where: str) -> tuple[Any, Mapping[str, Any] | None]:
    """(the messages up to the last assistant's, which a policy is to write, and that one); other values unchanged.

    Only a conversation that ends with the assistant is cut. InputError if nothing is left of it.
    """
    if not is_conversation(messages) or messages[-1]["role"] != "assistant":
        return messages, None
    if len(messages) == 1:
        raise InputError(f"{where}: the conversation has only an assistant's message, found {preview(messages)}")
    return list(messages[:-1]), messages[-1]


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


def is_implicit(row: Mapping[str, Any]) -> bool:
    """Whether the prompt of a row is in its columns `chosen` and `rejected`.

    So it is without a prompt, and where they are messages but the prompt is none (UltraFeedback's).
    """
    if row.get(CHOSEN) is None or row.get(REJECTED) is None:
        return False
    prompt = row.get("prompt")
    return prompt is None or (is_conversation(row[CHOSEN]) and not is_conversation(prompt))


def with_prompt(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """{"prompt", "chosen", "rejected"} of a row whose `chosen` and `rejected` begin with the prompt.

    Of messages the prompt is those that both begin with, without the last ones of the assistant. Of texts it ends
    before the white space in front of the first word that differs, or of the last word where one begins with the other.
    InputError, which begins with `where`, for other values and without a common beginning.
    """
    chosen, rejected = row[CHOSEN], row[REJECTED]
    if is_conversation(chosen) and is_conversation(rejected):
        most = min(len(chosen), len(rejected))
        pairs = zip(without_none(chosen), without_none(rejected), strict=False)  # Arrow fills up structs with None
        count = next((at for at, (one, other) in enumerate(pairs) if one != other), most)
        while count and (count >= most or chosen[count - 1]["role"] == "assistant"):
            count -= 1
    elif isinstance(chosen, str) and isinstance(rejected, str):
        most = min(len(chosen.rstrip()), len(rejected.rstrip())) - 1
        most = next((at for at in range(most) if chosen[at] != rejected[at]), most)
        count = next((at for at in range(most, 0, -1) if chosen[at].isspace() and chosen[:at].strip()), 0)
        while count and chosen[count - 1].isspace():
            count -= 1
    else:
        raise InputError(
            f"{where}: chosen and rejected must both be texts or both lists of messages, found {preview(chosen)} and "
            f"{preview(rejected)}"
        )
    if not count:
        raise InputError(
            f"{where}: there is no prompt, and chosen and rejected begin differently: give a column prompt"
        )
    return {"prompt": chosen[:count], CHOSEN: chosen[count:], REJECTED: rejected[count:]}


def _is_empty(said: Any) -> bool:
    """Whether a response, a text or messages, says nothing; None is none."""
    if is_conversation(said):
        return not any(message.get("content") or message.get("tool_calls") for message in said)
    return isinstance(said, str) and not said


def that_teach(rows: Sequence[dict[str, Any]], source: str) -> tuple[list[dict[str, Any]], list[str]]:
    """The rows without pairs of equal responses, and what to say of them, empty responses and labels of one class.

    InputError if no row is left.
    """
    kept = [row for row in rows if CHOSEN not in row or row[CHOSEN] != row.get(REJECTED)]
    notes = list[str]()
    if rows and not kept:
        raise InputError(f"{source}: chosen and rejected are equal in every row: there is nothing to learn")
    if count := len(rows) - len(kept):
        notes.append(
            f"{source}: {several(count, 'pair')} left out of {len(rows):,}, because chosen and rejected are equal"
        )
    if empty := sum(any(_is_empty(row.get(name)) for name in (CHOSEN, REJECTED, COMPLETION)) for row in kept):
        what = f"{several(empty, 'row')} with an empty response"
        notes.append(f"{source}: {what}, of which the token that ends it is all that counts: filter what is not meant")
    labels = Counter(bool(row[LABEL]) for row in kept if CHOSEN not in row and isinstance(row.get(LABEL), bool | int))
    if len(labels) == 1:
        notes.append(f"{source}: every label is {str(next(iter(labels))).lower()}, so that nothing is told apart")
    return kept, notes
