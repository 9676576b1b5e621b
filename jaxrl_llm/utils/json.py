"""Bounded parsing of untrusted JSON: every fault is a one-line reason, never a deep stack or a huge number."""

import json
import math
import re
import sys
from pathlib import Path
from typing import Any

from jaxrl_llm.utils.errors import InputError

MOST_DEPTH = 64  # levels of lists and objects, so that recursive code over values is safe
_SIGNATURES = {
    b"\x1f\x8b": "it is a gzip file: unpack it first",
    b"PK\x03\x04": "it is a zip file: unpack it first",
    b"\x28\xb5\x2f\xfd": "it is a zstd file: unpack it first",
    b"BZh": "it is a bzip2 file: unpack it first",
    b"\xfd7zXZ": "it is an xz file: unpack it first",
    b"PAR1": "it is a Parquet file: name it .parquet",
    b"\xff\xfe": "it is UTF-16 text: save it as UTF-8",
    b"\xfe\xff": "it is UTF-16 text: save it as UTF-8",
}


class NotJson(ValueError):
    """Text rejected as JSON. `reason`: one line. `line`: line number from 1, or 0 if unknown."""

    def __init__(self, reason: str, line: int = 0) -> None:
        super().__init__(reason)
        self.reason, self.line = reason, line


def parse_json(text: str, *, lenient: bool = False) -> Any:
    """The value of a JSON text, nested at most `MOST_DEPTH` levels.

    lenient: also accept NaN, infinities and unpaired surrogates such as "\\ud800". Python's JSON writes them, but they
        are not valid JSON numbers, or not valid UTF-8.

    Raises NotJson for anything else.

    >>> parse_json('{"a": [1, 2]}')
    {'a': [1, 2]}
    """
    try:
        # Hooks only in strict mode: they are slow.
        value = json.loads(text) if lenient else json.loads(text, parse_constant=_constant, parse_float=_float)
    except json.JSONDecodeError as error:
        raise NotJson(f"not JSON: {error.msg} at column {error.colno}", error.lineno) from None
    except RecursionError:
        raise NotJson(f"it is nested deeper than {MOST_DEPTH} levels") from None
    except NotJson:
        raise
    except ValueError:  # int() of too many digits
        most = sys.get_int_max_str_digits()
        found = re.search(rf"\d{{{most + 1}}}", text)
        line = text.count("\n", 0, found.start()) + 1 if found else 0
        raise NotJson(f"a number of more than {most} digits", line) from None
    if text.count("[") + text.count("{") > MOST_DEPTH and _is_deep(value):
        raise NotJson(f"it is nested deeper than {MOST_DEPTH} levels")
    if not lenient and re.search(r"\\u[dD][89a-fA-F]", text) and not is_unicode(json.dumps(value, ensure_ascii=False)):
        raise NotJson('half of a surrogate pair, such as "\\ud800", which is no character')
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The object in a small JSON file (NaN allowed). Raises FileNotFoundError, or InputError if it holds no object."""
    data = read_regular(path)
    try:
        text = data.decode("utf-8-sig")
        value = parse_json(text, lenient=True)
        if not isinstance(value, dict):
            raise NotJson(f"a {json_type(value)}, not an object")
        if not is_unicode(json.dumps(value, ensure_ascii=False)):
            raise NotJson('half of a surrogate pair, such as "\\ud800", which is no character')
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a JSON object: {not_text(data)}; repair or remove that file") from None
    except NotJson as error:
        where = f" (line {error.line})" if error.line else ""
        reason = "it is empty" if not data.strip() else not_text(data, error.reason)
        raise InputError(f"{path}{where} is not a JSON object: {reason}; repair or remove that file") from None
    return value


def read_regular(path: Path) -> bytes:
    """A file's bytes. Raises FileNotFoundError, or InputError if it is not a regular file or cannot be read."""
    try:
        check_regular(path)
        return path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error


def check_regular(path: Path) -> None:
    """InputError for a folder, a pipe or a device (reading the last two may block forever).

    Raises FileNotFoundError if nothing is there, since the caller may have a default.
    """
    path.stat()
    if path.is_dir():
        raise InputError(f"cannot read {path}: it is a folder, not a file")
    if not path.is_file():
        raise InputError(f"cannot read {path}: it is a pipe or a device, not a file; write its content to a file first")


def not_text(head: bytes, otherwise: str = "it is not UTF-8 text") -> str:
    """Why the first bytes of a file are not UTF-8 text or JSON, as far as they tell."""
    for signature, reason in _SIGNATURES.items():
        if head.startswith(signature):
            return reason
    if b"\0" in head[:4096]:
        return "it has NUL bytes, so it is damaged, or UTF-16 text: save it as UTF-8"
    return otherwise


def is_unicode(text: str) -> bool:
    """Whether a text can be encoded as UTF-8, i.e. has no unpaired surrogate."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def json_type(value: Any) -> str:
    """The JSON name of a Python value's type."""
    names = {dict: "object", list: "list", str: "text", bool: "true or false", int: "number", float: "number"}
    return "null" if value is None else names.get(type(value), type(value).__name__)


def _constant(name: str) -> float:
    raise NotJson(f"{name} is no JSON number: write null where there is none")


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise NotJson(f"the number {text[:40]} is beyond the range of floats")
    return value


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_DEPTH):
        inner = (x.values() if isinstance(x, dict) else x for x in level)
        level = [x for values in inner for x in values if isinstance(x, (dict, list))]
        if not level:
            return False
    return True
