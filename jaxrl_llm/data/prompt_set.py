"""Rows of a data set with the token ids of their prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jaxrl_llm.data.chat import encode_prompt
from jaxrl_llm.errors import InputError, shown


class PromptSet(NamedTuple):
    """Rows of a data set and the token ids of their prompts, in the same order."""

    rows: list[dict[str, Any]]
    ids: list[list[int]]
    skipped: int = 0  # prompts left out because they are too long
    shortened: int = 0  # prompts truncated because they are too long
    conflicting: int = 0  # rows left out that have the prompt of another row, but another answer


def encode_rows(
    tokenizer: Any, rows: Sequence[dict[str, Any]], *, max_tokens: int, long_prompts: str, system_prompt: str | None
) -> PromptSet:
    """Encode the prompts of rows.

    long_prompts: "skip", "truncate" (on the left) or "error", for prompts of more than `max_tokens` tokens.
    Raises InputError for an invalid prompt, and if all prompts are skipped.
    """
    kept, ids, skipped, shortened = [], [], 0, 0
    for number, row in enumerate(rows, start=1):
        try:
            tokens = encode_prompt(tokenizer, row["prompt"], system_prompt=system_prompt)
        except InputError as error:
            raise InputError(f"prompt {number} of {len(rows)}, {shown(row['prompt'])}: {error}") from None
        if len(tokens) > max_tokens:
            if long_prompts == "error":
                raise InputError(
                    f"a prompt has {len(tokens)} tokens, more than max_prompt_tokens {max_tokens}: "
                    "raise it, or set long_prompts to skip or truncate"
                )
            if long_prompts == "skip":
                skipped += 1
                continue
            tokens, shortened = tokens[-max_tokens:], shortened + 1
        kept.append(row)
        ids.append(tokens)
    if not kept:
        raise InputError(f"all {len(rows)} prompts have more than {max_tokens} tokens: raise max_prompt_tokens")
    return PromptSet(kept, ids, skipped, shortened)
