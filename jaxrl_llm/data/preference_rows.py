"""Rows of preference data: prompts that are the common beginning of two responses, and rows that teach nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_llm.data.chat.encode import is_conversation, preview
from jaxrl_llm.utils.errors import InputError, several

CHOSEN, REJECTED, COMPLETION, LABEL = "chosen", "rejected", "completion", "label"


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
        count = 0
        while count < min(len(chosen), len(rejected)) and _same(chosen[count], rejected[count]):
            count += 1
        while count and (count >= min(len(chosen), len(rejected)) or chosen[count - 1]["role"] == "assistant"):
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


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two messages are equal, but for keys that are None, with which Arrow fills up structs."""
    return {k: x for k, x in one.items() if x is not None} == {k: x for k, x in other.items() if x is not None}


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
    notes, dropped = [], len(rows) - len(kept)
    if dropped:
        what = several(dropped, "pair")
        if not kept:
            raise InputError(f"{source}: chosen and rejected are equal in every row: there is nothing to learn")
        notes.append(f"{source}: {what} left out of {len(rows):,}, because chosen and rejected are equal")
    if empty := sum(any(_is_empty(row.get(name)) for name in (CHOSEN, REJECTED, COMPLETION)) for row in kept):
        what = f"{several(empty, 'row')} with an empty response"
        notes.append(f"{source}: {what}, of which the token that ends it is all that counts: filter what is not meant")
    labels = Counter(bool(row[LABEL]) for row in kept if CHOSEN not in row and isinstance(row.get(LABEL), bool | int))
    if len(labels) == 1:
        notes.append(f"{source}: every label is {str(next(iter(labels))).lower()}, so that nothing is told apart")
    return kept, notes
