"""Rows of a data set with the token ids of their prompts."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from jaxrl_llm.data.chat.encode import encode_prompt, format_notes
from jaxrl_llm.data.chat.rendering import PromptFormat
from jaxrl_llm.data.load import Same, same_prompt
from jaxrl_llm.data.prefetch import Ahead
from jaxrl_llm.data.prompt_rows import SAMPLED, PromptRows
from jaxrl_llm.utils.errors import InputError, shown

logger = logging.getLogger("jaxrl_llm.data")
T = TypeVar("T")
WORKERS = 4  # threads that read and tokenise


class PromptSet(NamedTuple):
    """Rows of a data set and the token ids of their prompts, in the same order."""

    rows: Sequence[dict[str, Any]]
    ids: Sequence[list[int]]  # of rows read as they are drawn, empty for a prompt that is dropped
    skipped: int = 0  # prompts left out because they are too long
    shortened: int | None = 0  # prompts truncated because they are too long; None: not known before they are drawn
    conflicting: int = 0  # rows left out that have the prompt of another row, but another answer
    ahead: Callable[[Iterable[int]], None] | None = None  # of rows read as they are drawn: begin to read these
    encode: Callable[..., list[int]] | None = None  # (prompt, row=None) -> token ids, encoded as these were


class Drawn(NamedTuple):
    """A row that was read, and the token ids of its prompt; none if it is dropped."""

    row: dict[str, Any]
    ids: list[int]


def encode_rows(
    tokenizer: Any, rows: Sequence[dict[str, Any]], *, max_tokens: int, long_prompts: str, system_prompt: str | None,
    format: PromptFormat | None = None, dialect: bool = False, vocabulary: int | None = None,
) -> PromptSet:  # fmt: skip
    """Encode the prompts of rows, with their columns `tools` and `chat_template_kwargs` where there are.

    long_prompts: "skip", "truncate" (on the left) or "error", for prompts of more than `max_tokens` tokens.
    dialect: see `encode_prompt`. vocabulary: ids that the model has (None: any).
    Raises InputError for an invalid prompt, an id that the model does not have, and if all prompts are skipped.
    """
    kept, ids, skipped, shortened = [], [], 0, 0
    for number, row in enumerate(rows, start=1):
        try:
            tokens = encode_prompt(
                tokenizer, row["prompt"], system_prompt=system_prompt, format=format, row=row, dialect=dialect
            )
            check_vocabulary(tokens, vocabulary)
        except InputError as error:
            raise InputError(f"prompt {number} of {len(rows)}, {shown(row['prompt'])}: {error}") from None
        fitting = _fit(tokens, max_tokens, long_prompts)
        if not fitting:
            skipped += 1
            continue
        shortened += len(fitting) < len(tokens)
        kept.append(row)
        ids.append(fitting)
    if not kept:
        raise InputError(f"{_all(len(rows))} more than {max_tokens} tokens: raise max_prompt_tokens")

    def encode(prompt: Any, row: dict[str, Any] | None = None) -> list[int]:
        return encode_prompt(tokenizer, prompt, system_prompt=system_prompt, format=format, row=row, dialect=dialect)

    _tell(tokenizer, rows[:SAMPLED], format)
    return PromptSet(kept, ids, skipped, shortened, encode=encode)


def encode_as_drawn(
    tokenizer: Any,
    rows: PromptRows,
    *,
    max_tokens: int,
    long_prompts: str,
    system_prompt: str | None,
    format: PromptFormat | None = None,
    dialect: bool = False,
    held_out: Iterable[dict[str, Any]] = (),
    same: Same = same_prompt,
    workers: int = WORKERS,
    vocabulary: int | None = None,
) -> PromptSet:
    """Encode the prompts of rows as they are drawn, in worker threads, of which no result depends.

    long_prompts: as in `encode_rows`; prompts to skip are dropped when they are drawn. So are rows of a task
    that is a `held_out` row's too, by `same`; repeated ones stay. Raises InputError, and its rows when they are drawn,
    naming the file and the row, for an invalid prompt; here too if all sampled prompts are skipped.
    """
    unwanted, one_at_a_time = {same(row) for row in held_out}, threading.Lock()

    def encode(row: dict[str, Any], where: str) -> list[int]:
        try:
            with one_at_a_time:  # tokenizers may not be shared between threads
                ids = encode_prompt(
                    tokenizer, row["prompt"], system_prompt=system_prompt, format=format, row=row, dialect=dialect
                )
            check_vocabulary(ids, vocabulary)
            return _fit(ids, max_tokens, long_prompts)
        except InputError as error:
            raise InputError(f"{where}, {shown(row['prompt'])}: {error}") from None

    def encode_another(prompt: Any, row: dict[str, Any] | None = None) -> list[int]:
        with one_at_a_time:
            return encode_prompt(
                tokenizer, prompt, system_prompt=system_prompt, format=format, row=row, dialect=dialect
            )

    def load(numbers: list[int]) -> list[Drawn]:
        found = zip(numbers, rows.rows(numbers), strict=True)
        return [Drawn(row, [] if same(row) in unwanted else encode(row, rows.where(number))) for number, row in found]

    if not any([encode(row, where) for where, row in rows.sample]):
        raise InputError(
            f"all {len(rows.sample)} prompts that were sampled from {rows.name} have more than {max_tokens} tokens: "
            "raise max_prompt_tokens"
        )
    _tell(tokenizer, [row for _, row in rows.sample], format)
    drawn = Ahead(load, workers, lambda number: int(rows.order[number]))
    return PromptSet(
        _Lookup(len(rows), lambda number: drawn[number].row), _Lookup(len(rows), lambda number: drawn[number].ids),
        shortened=None if long_prompts == "truncate" else 0, ahead=drawn.start,
        encode=encode_another,
    )  # fmt: skip


def _tell(tokenizer: Any, rows: Sequence[dict[str, Any]], format: PromptFormat | None) -> None:
    for text in format_notes(tokenizer, rows, format or PromptFormat()):
        logger.warning("%s", text)


class _Lookup(Sequence[T], Generic[T]):
    """A sequence of which each element is looked up when it is asked for."""

    def __init__(self, count: int, look_up: Callable[[int], T]) -> None:
        self._count, self._look_up = count, look_up

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._look_up(number) for number in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(f"there are {self._count} prompts, found the index {index}")
        return self._look_up(int(index) % self._count)


def check_vocabulary(ids: Sequence[int], vocabulary: int | None) -> None:
    """InputError for an id that a model of so many ids does not have."""
    if vocabulary is not None and ids and max(ids) >= vocabulary:
        raise InputError(
            f"it has the token id {max(ids)}, but the model's vocabulary has {vocabulary}: the tokenizer is another "
            "model's, or has tokens that were added without embeddings"
        )


def _all(count: int) -> str:
    return "the only prompt has" if count == 1 else f"all {count:,} prompts have"


def _fit(ids: list[int], max_tokens: int, long_prompts: str) -> list[int]:
    """The ids; shortened or none if they are too long. InputError if that is an error."""
    if len(ids) <= max_tokens or long_prompts == "truncate":
        return ids[-max_tokens:]
    if long_prompts == "error":
        raise InputError(
            f"a prompt has {len(ids)} tokens, more than max_prompt_tokens {max_tokens}: "
            "raise it, or set long_prompts to skip or truncate"
        )
    return []
