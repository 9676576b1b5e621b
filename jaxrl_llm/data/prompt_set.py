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
    skipped: int = 0  # longer than allowed
    shortened: int = 0
    conflicting: int = 0  # rows left out that ask what another does, with another answer


def encode_rows(
    tokenizer: Any, rows: Sequence[dict[str, Any]], *, max_tokens: int, long_prompts: str, system_prompt: str | None
) -> PromptSet:
    """Tokenise prompts once; those of more than `max_tokens` are skipped, truncated on the left, or an error."""
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
