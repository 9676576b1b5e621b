"""Digests and canonical texts of rows, equal in every process: to compare rows, and to recognise them on resume."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


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
