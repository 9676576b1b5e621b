"""Rows of prompts that are read as they are drawn, from a source with random access; and digests of rows.

Digests and canonical texts are equal in every process: to compare rows, and to recognise them on resume.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from jaxrl_llm.data.sources.files import Row
from jaxrl_llm.data.sources.random_access import RandomAccess, row_of
from jaxrl_llm.utils.errors import InputError, error_line

SAMPLED = 64  # rows of a source that are checked when it is opened, evenly spaced from the first to the last


def rows_digest(rows: Iterable[Mapping[str, Any]]) -> str:
    """32 hexadecimal digits that depend on the rows, their order, and all their values; equal in every process.

    The order of a row's columns does not matter, nor whether a sequence is a list or a tuple. Values that JSON cannot
    represent (dates, bytes, arrays ...) are hashed by type and content, objects without a repr of their own by type.

    >>> rows_digest([{"prompt": "a", "answer": 1}]) == rows_digest([{"answer": 1, "prompt": "a"}])
    True
    """
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(canonical(row).encode("ascii"))
        digest.update(b"\n")
    return digest.hexdigest()


def canonical(value: Any) -> str:
    """A value as one line of ASCII JSON with sorted keys, the same for equal values in every process."""
    try:
        return json.dumps(value, sort_keys=True, default=_plain)
    except (TypeError, ValueError, RecursionError):  # mixed or non-JSON keys; circular references; huge integers
        return json.dumps(_plain_all(value, 0), sort_keys=True)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype != object:
        content = hashlib.blake2b(np.ascontiguousarray(value).tobytes(), digest_size=16).hexdigest()
        return [str(value.dtype), list(value.shape), content]
    if isinstance(value, (set, frozenset)):
        return ["set", sorted(map(canonical, value))]
    if isinstance(value, (bytes, bytearray)):
        return ["bytes", value.hex()]
    # Addresses differ between processes.
    return [type(value).__qualname__, re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value))]


def _plain_all(value: Any, depth: int) -> Any:
    if depth > 100:  # a circular reference
        return "..."
    if isinstance(value, Mapping):
        items = [[canonical(key), _plain_all(x, depth + 1)] for key, x in value.items()]
        return ["dict", sorted(items, key=lambda item: item[0])]
    if isinstance(value, (list, tuple)):
        return [_plain_all(x, depth + 1) for x in value]
    if isinstance(value, int) and not isinstance(value, bool):
        return hex(value)  # has no limit on the number of digits, unlike decimal
    return value if value is None or isinstance(value, (str, float, bool)) else _plain(value)


@dataclass(frozen=True, eq=False)
class PromptRows(Sequence[Row]):
    """Rows like those of `load_prompts`, of which only those asked for are read and checked.

    Reading raises InputError, naming the file and the row, for a row that is malformed or has no valid prompt.
    """

    source: RandomAccess
    name: str
    finish: Callable[[Row, str], Row]
    """(row, where it is) -> the row with its prompt."""
    order: np.ndarray
    """The index in the source of each row, int[rows]."""
    columns: tuple[str, ...] = ()
    """Of all rows: those that the source names, and those of the sampled rows. Others are left out."""
    sample: tuple[tuple[str, Row], ...] = ()
    """Rows that were checked at the start, each with where it is."""
    fingerprint: str = ""
    """A digest of what is known without reading every row: their number, the files' sizes and columns, the sample."""

    def __len__(self) -> int:
        return len(self.order)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return self.rows(range(*index.indices(len(self))))
        return self.rows([index])[0]

    def rows(self, numbers: Sequence[int]) -> list[Row]:
        """The rows of these numbers, read together."""
        at = self.order[np.asarray(numbers, np.int64)].tolist()
        records = zip(at, self._records(at), strict=True)
        return [self._finished(row_of(record, self._where(index)), self._where(index)) for index, record in records]

    def where(self, number: int) -> str:
        """Where a row is, for errors: its file and line, or the source and its number there, from 1."""
        return self._where(int(self.order[number]))

    def take(self, numbers: np.ndarray) -> PromptRows:
        """The rows of these numbers, in this order."""
        return dataclasses.replace(self, order=self.order[numbers])

    def _where(self, index: int) -> str:
        where = getattr(self.source, "where", None)
        return f"{self.name}, row {index + 1}" if where is None else str(where(index))

    def _records(self, at: list[int]) -> list[Any]:
        together = getattr(self.source, "_getitems", None) or getattr(self.source, "__getitems__", None)
        try:
            return list(together(at)) if together is not None and at else [self.source[index] for index in at]
        except InputError:
            raise
        except Exception as error:  # of a source that is not ours
            what = f"{self._where(at[0])}{f' or one of {len(at) - 1} others' if len(at) > 1 else ''}"
            raise InputError(f"cannot read {what}: {error_line(error)}") from error

    def _finished(self, row: Row, where: str) -> Row:
        return self.finish({name: row.get(name) for name in self.columns} if self.columns else row, where)


def rows_as_drawn(source: RandomAccess, name: str, count: int, finish: Callable[[Row, str], Row]) -> PromptRows:
    """The first `count` rows of a source. InputError if one of the rows sampled is malformed or has no valid prompt."""
    some = [i * (count - 1) // (SAMPLED - 1) for i in range(SAMPLED)] if count > SAMPLED else list(range(count))
    raw = PromptRows(source, name, lambda row, where: row, np.arange(count, dtype=np.min_scalar_type(count)))
    sampled = raw.rows(some)
    places = [raw.where(number) for number in some]
    columns = tuple(dict.fromkeys([*getattr(source, "columns", ()), *(column for row in sampled for column in row)]))
    rows = dataclasses.replace(raw, finish=finish, columns=columns)
    sample = tuple((where, rows._finished(row, where)) for where, row in zip(places, sampled, strict=True))
    facts = {"rows": count, "files": getattr(source, "facts", None)}
    return dataclasses.replace(rows, sample=sample, fingerprint=rows_digest([facts, *(row for _, row in sample)]))
