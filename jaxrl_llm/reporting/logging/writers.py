"""Metric writers. The JSON-lines file is authoritative; TensorBoard and the services (`services`) get copies."""

from __future__ import annotations

import contextlib
import json
import math
import operator
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from jaxrl_llm.reporting.logging.files import iterate_jsonl, read_json, read_jsonl, truncate_jsonl
from jaxrl_llm.reporting.logging.tensorboard import EventFile, read_scalars
from jaxrl_llm.utils.errors import InputError, naming, shown

__all__ = [
    "JsonlWriter",
    "MetricWriter",
    "TensorBoardWriter",
    "all_of",
    "iterate_jsonl",
    "read_json",
    "read_jsonl",
    "read_scalars",
    "truncate_jsonl",
]


class MetricWriter(Protocol):
    """The protocol of a metric writer. `step` counts from 0; a metric is a Python, NumPy or JAX scalar."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def flush(self) -> None:
        """Wait until everything written is on disk, or handed over if it is not a file. OSError if that fails."""
        ...

    def close(self) -> None: ...


class JsonlWriter:
    """Appends a JSON object per line to `path`: `{"step": 3, "entropy": 0.4, ...}`, with metrics sorted by name.

    Each line is handed to the operating system at once, so a killed run loses at most the line being written; after
    `flush`, or with `sync=True` after each line, it also survives a crash of the machine. NaN and infinities become
    null, since JSON has neither. A half-written last line of an earlier run is dropped on opening.
    """

    def __init__(self, path: str | os.PathLike[str], *, sync: bool = False) -> None:
        self._path = Path(path)
        self._sync = sync
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists() and not _ends_in_newline(self._path):
            truncate_jsonl(self._path, math.inf)
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line. Raises InputError for a metric that is not a scalar, or is named "step"."""
        if "step" in metrics:
            raise InputError("a metric is named 'step', which is the name of the step number: rename it")
        values = {name: _finite(number_of(name, metrics[name])) for name in sorted(metrics)}
        line = json.dumps({"step": step_of(step), **values}, allow_nan=False) + "\n"
        with naming(self._path):
            self._file.write(line)
            self._file.flush()
        if self._sync:
            self.flush()

    def flush(self) -> None:
        """Wait until all lines are on disk. OSError if that fails."""
        with naming(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        with naming(self._path):
            self._file.close()


class TensorBoardWriter:
    """Writes scalars as TensorBoard event files in `folder`; a kill leaves all scalars of a step or none.

    `purge_step`: on resume, the first step that will be written again; TensorBoard hides older events from there on.
    Needs the package tensorboardX, but not its writer, whose queue would be lost in a kill.
    """

    def __init__(self, folder: str | os.PathLike[str], *, purge_step: int | None = None) -> None:
        self._events = EventFile(Path(folder), None if purge_step is None else step_of(purge_step))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write each metric as a scalar. Raises InputError for a metric that is not a scalar."""
        self._events.add_scalars(step_of(step), {name: number_of(name, value) for name, value in metrics.items()})

    def flush(self) -> None:
        """Wait until all events are on disk. OSError if that fails."""
        self._events.flush()

    def close(self) -> None:
        """Close the event file; a second call does nothing."""
        self._events.close()


class _AllOf:
    def __init__(self, writers: tuple[MetricWriter, ...]) -> None:
        self._writers = writers

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.write(step, metrics)

    def flush(self) -> None:
        for writer in self._writers:
            writer.flush()

    def close(self) -> None:
        # An ExitStack closes every writer even if one of them fails, and then raises that error.
        with contextlib.ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)


def all_of(*writers: MetricWriter) -> MetricWriter:
    """A writer that forwards to each of `writers`, in order; without any it drops everything."""
    return _AllOf(writers)


def _ends_in_newline(path: Path) -> bool:
    """Whether the file is empty or its last line is complete."""
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def step_of(step: Any) -> int:
    """The step as an int; InputError unless it is a whole number in range."""
    try:
        whole = -1 if isinstance(step, bool) else operator.index(step)
    except TypeError:
        whole = -1
    if not 0 <= whole < 2**63:
        raise InputError(f"step is {shown(step)}, but must be a whole number, at least 0 and below 2^63")
    return whole


def number_of(name: str, value: Any) -> float | int:
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


def _finite(value: float | int) -> float | int | None:
    return value if math.isfinite(value) else None
