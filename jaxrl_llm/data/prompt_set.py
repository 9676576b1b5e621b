"""Rows of a data set with the token ids of their prompts."""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

from jaxrl_llm.data.chat.encode import encode_prompt, format_notes
from jaxrl_llm.data.chat.rendering import PromptFormat
from jaxrl_llm.data.load import Same, same_prompt
from jaxrl_llm.data.prompt_rows import SAMPLED, PromptRows
from jaxrl_llm.utils.errors import InputError, shown

T = TypeVar("T")
logger = logging.getLogger("jaxrl_llm.data")
WORKERS = 4  # threads that read and tokenise


class Ahead(Generic[T]):
    """The values of numbers. Which are computed ahead, and by how many threads, changes none of them.

    load: numbers -> their values, called from several threads. workers: number of threads.
    place: numbers are loaded in the order of their places, so that neighbours are loaded together.

    The values used last are kept: four times as many as are asked for at once.
    """

    def __init__(self, load: Callable[[list[int]], list[T]], workers: int, place: Callable[[int], int]) -> None:
        self._load, self._workers, self._place = load, workers, place
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="prompts")
        self._found: OrderedDict[int, tuple[Future[list[T]], int]] = OrderedDict()
        self._room = 0

    def start(self, numbers: Iterable[int]) -> None:
        """Begin to compute the values of these numbers, unless they are known."""
        wanted = dict.fromkeys(int(number) for number in numbers)
        new = sorted((number for number in wanted if number not in self._found), key=self._place)
        size = -(-len(new) // self._workers)
        for chunk in [new[i : i + size] for i in range(0, len(new), max(size, 1))]:
            future = self._pool.submit(self._load, chunk)
            self._found.update((number, (future, place)) for place, number in enumerate(chunk))
        for number in wanted:
            self._found.move_to_end(number)
        self._room = max(self._room, 4 * len(wanted))
        while len(self._found) > self._room:
            self._found.popitem(last=False)

    def __getitem__(self, number: int) -> T:
        if number not in self._found:
            self.start([number])
        future, place = self._found[number]
        self._found.move_to_end(number)
        try:
            return future.result()[place]
        except Exception:  # of any number that was loaded together with this one
            return self._load([number])[0]


class PromptSet(NamedTuple):
    """Rows of a data set and the token ids of their prompts, in the same order."""

    rows: Sequence[dict[str, Any]]
    ids: Sequence[list[int]]  # of rows read as they are drawn, empty for a prompt that is dropped
    skipped: int = 0  # prompts left out because they are too long
    shortened: int | None = 0  # prompts truncated because they are too long; None: not known before they are drawn
    conflicting: int = 0  # rows left out that have the prompt of another row, but another answer
    ahead: Callable[[Iterable[int]], None] | None = None  # of rows read as they are drawn: begin to read these
    encode: Callable[..., list[int]] | None = None  # (prompt, row=None) -> token ids, encoded as these were


def encode_rows(
    tokenizer: Any, rows: Sequence[dict[str, Any]], *, max_tokens: int, long_prompts: str, system_prompt: str | None,
    format: PromptFormat | None = None, dialect: bool = False, vocabulary: int | None = None,
) -> PromptSet:  # fmt: skip
    """Encode the prompts of rows, with their columns `tools` and `chat_template_kwargs` where there are.

    long_prompts: "skip", "truncate" (on the left) or "error", for prompts of more than `max_tokens` tokens.
    dialect: see `encode_prompt`. vocabulary: ids that the model has (None: any).
    Raises InputError for an invalid prompt, an id that the model does not have, and if all prompts are skipped.
    """
    encode = partial(encode_prompt, tokenizer, system_prompt=system_prompt, format=format, dialect=dialect)
    kept, ids, skipped, shortened = [], [], 0, 0
    for number, row in enumerate(rows, start=1):
        try:
            tokens = encode(row["prompt"], row=row)
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
        every = "the only prompt has" if len(rows) == 1 else f"all {len(rows):,} prompts have"
        raise InputError(f"{every} more than {max_tokens} tokens: raise max_prompt_tokens")

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
    encode_one = partial(encode_prompt, tokenizer, system_prompt=system_prompt, format=format, dialect=dialect)

    def encode(prompt: Any, row: dict[str, Any] | None = None) -> list[int]:
        with one_at_a_time:  # tokenizers may not be shared between threads
            return encode_one(prompt, row=row)

    def encoded(row: dict[str, Any], where: str) -> list[int]:
        try:
            ids = encode(row["prompt"], row)
            check_vocabulary(ids, vocabulary)
            return _fit(ids, max_tokens, long_prompts)
        except InputError as error:
            raise InputError(f"{where}, {shown(row['prompt'])}: {error}") from None

    def load(numbers: list[int]) -> list[tuple[dict[str, Any], list[int]]]:
        """Rows with the token ids of their prompts; none of a prompt that is dropped."""
        found = zip(numbers, rows.rows(numbers), strict=True)
        return [(row, [] if same(row) in unwanted else encoded(row, rows.where(number))) for number, row in found]

    if not any([encoded(row, where) for where, row in rows.sample]):
        raise InputError(
            f"all {len(rows.sample)} prompts that were sampled from {rows.name} have more than {max_tokens} tokens: "
            "raise max_prompt_tokens"
        )
    _tell(tokenizer, [row for _, row in rows.sample], format)
    drawn = Ahead(load, workers, lambda number: int(rows.order[number]))
    return PromptSet(
        _Lookup(len(rows), lambda number: drawn[number][0]), _Lookup(len(rows), lambda number: drawn[number][1]),
        shortened=None if long_prompts == "truncate" else 0, ahead=drawn.start,
        encode=encode,
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
