"""The JSON and JSON-lines files of a run; a kill can leave the last line of the latter half-written."""

import math
import operator
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jaxrl_llm.utils.errors import InputError, naming, shown
from jaxrl_llm.utils.json import NotJson, check_regular, json_type, not_text, parse_json, read_object

_LONGEST = 2**28  # maximum bytes of a line; a run writes no longer ones, and they could exhaust memory


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The object in a JSON file; empty if there is no such file. InputError if it holds anything else."""
    try:
        return read_object(Path(path))
    except FileNotFoundError:
        return {}


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The objects of a JSON-lines file; a half-written last line is ignored.

    Raises InputError if the file is missing, or a complete line is not a JSON object.
    """
    return [row for _, row in iterate_jsonl(path)]


def iterate_jsonl(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Like `read_jsonl`, but one at a time with its byte offset in the file, for files larger than memory."""
    offset = 0
    for _, line, row in _lines(Path(path)):
        if row is not None:
            yield offset, row
        offset += len(line)


def truncate_jsonl(
    path: str | os.PathLike[str], step: float, drop: Callable[[dict[str, Any]], bool] = lambda row: False
) -> None:
    """Drop the lines whose "step" is at least `step`, others that `drop` names, and a half-written last line.

    The file is replaced atomically, so a crash leaves the old or the new one. A missing file is left missing; lines
    without a step are kept. Raises InputError, and leaves the file unchanged, for a damaged line or a step that is not
    a number.
    """
    path = Path(path)
    if not path.exists():
        return
    temporary = path.with_name(path.name + ".partial")
    try:
        with naming(temporary), open(temporary, "wb") as file:
            for number, line, row in _lines(path):
                if row is None:
                    continue
                at = row.get("step", -math.inf)
                if not is_number(at) or math.isnan(at):
                    raise InputError(f"{path}, line {number}: its step is {shown(at)}; repair or remove that line")
                if at < step and not drop(row):
                    file.write(line.rstrip(b"\r\n") + b"\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def is_number(value: Any) -> bool:
    """Whether a value from JSON is a number (true and false are not)."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def step_of(step: Any) -> int:
    """The step as an int; InputError unless it is a whole number in range."""
    try:
        whole = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        whole = -1
    if not 0 <= whole < 2**63:
        raise InputError(f"step is {shown(step)}, but must be a whole number, at least 0 and below 2^63")
    return whole


def python_number(name: str, value: Any) -> float | int:
    """A metric as a Python number; integers stay integers."""
    try:
        if isinstance(value, (str, bytes)) or getattr(value, "shape", ()) != ():
            raise TypeError
        number = float(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"metric {name!r} is not a number but {type(value).__name__}: pass one scalar") from error
    except OverflowError as error:
        raise InputError(f"metric {name!r} is beyond the range of floats: pass a smaller number") from error
    return int(value) if isinstance(value, int) else number


def _lines(path: Path) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Each line's number, bytes and object; the object is None for a blank line or a half-written last one."""
    try:
        check_regular(path)
        file = open(path, "rb")  # noqa: SIM115 (closed by the with below)
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from error
    with file:
        bad = None
        for number, line in enumerate(iter(lambda: file.readline(_LONGEST), b""), start=1):
            if bad is not None:
                raise bad
            row, reason = _object(line)
            if reason:
                bad = InputError(f"{path}, line {number}: {reason}; repair or remove that line")
                if line.endswith(b"\n"):  # a complete line, so this is damage
                    raise bad
            yield number, line, row


def _object(line: bytes) -> tuple[dict[str, Any] | None, str]:
    """(the object in a line, or None; the reason why there is none, empty for a blank line)."""
    if not line.strip():
        return None, ""
    try:
        row = parse_json(line.decode("utf-8-sig"), lenient=True)
    except UnicodeDecodeError:
        return None, not_text(line)
    except NotJson as error:
        return None, not_text(line, error.reason)
    return (row, "") if isinstance(row, dict) else (None, f"a {json_type(row)}, not a JSON object")
