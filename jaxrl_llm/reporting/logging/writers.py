"""Metric writers. The JSON-lines file is authoritative; TensorBoard and the services (`services`) get copies."""

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxrl_llm.reporting.logging.files import (
    iterate_jsonl,
    python_number,
    read_json,
    read_jsonl,
    step_of,
    truncate_jsonl,
)
from jaxrl_llm.reporting.logging.tensorboard import TensorBoardWriter, read_scalars
from jaxrl_llm.utils.errors import InputError, naming

__all__ = [
    "JsonlWriter", "MetricWriter", "TensorBoardWriter", "all_of", "iterate_jsonl", "read_json", "read_jsonl",
    "read_scalars", "truncate_jsonl",
]  # fmt: skip


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
        if self._path.exists():
            with open(self._path, "rb") as file:
                file.seek(max(file.seek(0, os.SEEK_END) - 1, 0))
                half_written = file.read(1) not in (b"", b"\n")
            if half_written:
                truncate_jsonl(self._path, math.inf)
        self._file = open(self._path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one line. Raises InputError for a metric that is not a scalar, or is named "step"."""
        if "step" in metrics:
            raise InputError("a metric is named 'step', which is the name of the step number: rename it")
        numbers = {name: python_number(name, metrics[name]) for name in sorted(metrics)}
        values = {name: number if math.isfinite(number) else None for name, number in numbers.items()}
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


class _AllOf(NamedTuple):
    writers: tuple[MetricWriter, ...]

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        for writer in self.writers:
            writer.write(step, metrics)

    def flush(self) -> None:
        for writer in self.writers:
            writer.flush()

    def close(self) -> None:
        # An ExitStack closes every writer even if one of them fails, and then raises that error.
        with contextlib.ExitStack() as stack:
            for writer in self.writers:
                stack.callback(writer.close)


def all_of(*writers: MetricWriter) -> MetricWriter:
    """A writer that forwards to each of `writers`, in order; without any it drops everything."""
    return _AllOf(writers)
