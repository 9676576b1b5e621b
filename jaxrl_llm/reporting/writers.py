"""Metric writers: where the numbers of each step go. The file of JSON lines is the record; the others are copies."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from jaxrl_llm.errors import InputError, need


class MetricWriter(Protocol):
    """Anything with these two methods. `step` counts from 0; a metric is a Python, NumPy or JAX scalar."""

    def write(self, step: int, metrics: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class JsonlWriter:
    """Appends one JSON object a line to `path`: `{"step": 3, "entropy": 0.4, ...}`, the metrics sorted by name.

    Each line is flushed, so that a killed run loses at most the line being written; `sync=True` also survives
    a crash of the machine. NaN and infinities become null, because JSON has none. A half-written last line that an
    earlier run left is dropped on opening.
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
        values = {name: _finite(_number(name, metrics[name])) for name in sorted(metrics)}
        self._file.write(json.dumps({"step": int(step), **values}, allow_nan=False) + "\n")
        self._file.flush()
        if self._sync:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        self._file.close()


class TensorBoardWriter:
    """Writes scalars as TensorBoard event files in `folder`.

    `purge_step`: on resume, the first step that will be written again; TensorBoard hides older events from there on.
    Needs the package tensorboardX.
    """

    def __init__(self, folder: str | os.PathLike[str], *, purge_step: int | None = None) -> None:
        try:
            import tensorboardX
        except ImportError as error:
            raise need("tensorboardX", "run", "writing TensorBoard events") from error
        self._writer = tensorboardX.SummaryWriter(logdir=os.fspath(folder), purge_step=purge_step)

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write each metric as a scalar. Raises InputError for a metric that is not a scalar."""
        for name in sorted(metrics):
            self._writer.add_scalar(name, _number(name, metrics[name]), int(step))
        self._writer.flush()

    def close(self) -> None:
        """Write out what is buffered and close the event file."""
        try:
            self._writer.close()
        except OSError:
            # On a full disk, tensorboardX would try again, and fail again with a traceback, when the process ends.
            events = self._writer.file_writer.event_writer
            events._worker.stop()
            events._closed = True
            raise


class WandbWriter:
    """Logs to a Weights & Biases run: `project` and `name` as shown there, `config` its settings.

    Local files go to `folder`. Needs the package wandb.
    """

    def __init__(
        self, project: str, name: str | None, config: Mapping[str, Any], folder: str | os.PathLike[str]
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise need("wandb", "wandb", "logging to Weights & Biases") from error
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._run: Any = wandb.init(project=project, name=name, config=dict(config), dir=os.fspath(folder))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log the metrics of one step. Raises InputError for a metric that is not a scalar."""
        self._run.log({name: _number(name, value) for name, value in metrics.items()}, step=int(step))

    def close(self) -> None:
        """Mark the run as finished."""
        self._run.finish()


class _AllOf:
    def __init__(self, writers: tuple[MetricWriter, ...]) -> None:
        self._writers = writers

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.write(step, metrics)

    def close(self) -> None:
        # An ExitStack closes every writer even where one of them fails, and then raises that failure.
        with contextlib.ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)


def all_of(*writers: MetricWriter) -> MetricWriter:
    """The writer that passes everything on to each of `writers`, in order; with none it drops everything."""
    return _AllOf(writers)


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The object in a JSON file; empty where there is no such file. Raises InputError where it holds something else."""
    try:
        value = json.loads(Path(path).read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise InputError(f"{os.fspath(path)}: not a JSON object; repair or remove that file")
    return value


def read_jsonl(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """The objects of a file of one JSON object a line, without a half-written last line if there is one.

    Raises InputError for a missing file, or a line before the last that is no JSON object.
    """
    return [row for _, row in iterate_jsonl(path)]


def iterate_jsonl(path: str | os.PathLike[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Like `read_jsonl`, one at a time, each with its byte offset in the file (for files larger than memory)."""
    offset = 0
    for line, row in _lines(path):
        if row is not None:
            yield offset, row
        offset += len(line)


def _lines(path: str | os.PathLike[str]) -> Iterator[tuple[bytes, dict[str, Any] | None]]:
    """Each line as it stands, with its object: None where it is blank, or damaged and the last."""
    try:
        file = open(path, "rb")  # noqa: SIM115 (closed by the with below)
    except OSError as error:
        raise InputError(f"cannot read {os.fspath(path)}: {error.strerror}") from error
    with file:
        bad = None
        for number, line in enumerate(file, start=1):
            if bad is not None:
                raise InputError(f"{os.fspath(path)}, line {bad}: not a JSON object; repair or remove that line")
            try:
                row = json.loads(line)
            except ValueError:  # also half of a UTF-8 character
                row = None
            if not isinstance(row, dict):
                row = None
                bad = number if line.strip() else None
            yield line, row


def truncate_jsonl(path: str | os.PathLike[str], step: float) -> None:
    """Drop the lines whose "step" is `step` or later, and a half-written last line: do this before resuming at `step`.

    The file is replaced in one move, so a crash leaves either the old or the new one. A missing file stays missing;
    lines without a step stay. Raises InputError for a damaged line before the last.
    """
    path = Path(path)
    if not path.exists():
        return
    temporary = path.with_name(path.name + ".partial")
    with open(temporary, "wb") as file:
        for line, row in _lines(path):
            if row is None:
                continue
            at = row.get("step")
            if not isinstance(at, (int, float)) or at < step:
                file.write(line.rstrip(b"\r\n") + b"\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _ends_in_newline(path: Path) -> bool:
    """Whether the file is empty or its last line is complete."""
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


def _number(name: str, value: Any) -> float | int:
    """A metric as a Python number; whole numbers stay whole."""
    if isinstance(value, int):
        return int(value)
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"metric {name!r} is not a number but {type(value).__name__}: pass one scalar") from error


def _finite(value: float | int) -> float | int | None:
    return value if math.isfinite(value) else None
