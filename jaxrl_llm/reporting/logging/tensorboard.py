"""TensorBoard event files, written without a queue or thread, so that written events survive a kill."""

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jaxrl_llm.reporting.logging.files import python_number, step_of
from jaxrl_llm.utils.errors import InputError, naming, optional_package

_HEAD, _CHECKSUM = struct.Struct("<Q"), struct.Struct("<I")


class TensorBoardWriter:
    """Writes scalars as a new TensorBoard event file in `folder`; a kill leaves all scalars of a step or none.

    `purge_step`: on resume, the first step that will be written again; TensorBoard hides older events from there on.
    The format is a sequence of records: u64 length, u32 checksum of the length, an Event protocol buffer, u32 checksum
    of that. Needs the package tensorboardX, but not its writer, whose queue would be lost in a kill.
    """

    def __init__(self, folder: str | os.PathLike[str], *, purge_step: int | None = None) -> None:
        purge_step = None if purge_step is None else step_of(purge_step)
        self._proto = _proto()
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        # Readers take files in the order of their names, which other writers begin with the time in seconds. Here it is
        # in microseconds, so that files of the same second do not overwrite each other.
        self._path = folder / f"events.out.tfevents.{time.time_ns() // 1000:016}.{socket.gethostname()}.{os.getpid()}"
        self._file = open(self._path, "xb")  # noqa: SIM115 (closed by close)
        self._add(self._proto.Event(file_version="brain.Event:2"))
        if purge_step is not None:
            start = self._proto.SessionLog(status=self._proto.SessionLog.START)
            self._add(self._proto.Event(step=purge_step, session_log=start))

    def write(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write each metric as a scalar. Raises InputError for a metric that is not a scalar."""
        scalars = {name: python_number(name, value) for name, value in metrics.items()}
        from tensorboardX.summary import scalar

        event = self._proto.Event(step=step_of(step))
        for name in sorted(scalars):
            event.summary.MergeFrom(scalar(name, scalars[name]))
        self._add(event)

    def flush(self) -> None:
        """Wait until all events are on disk. OSError if that fails."""
        with naming(self._path):
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the event file; a second call does nothing."""
        with naming(self._path):
            self._file.close()

    def _add(self, event: Any) -> None:
        event.wall_time = time.time()
        data = event.SerializeToString()
        head = _HEAD.pack(len(data))
        with naming(self._path):
            self._file.write(head + _CHECKSUM.pack(_checksum(head)) + data + _CHECKSUM.pack(_checksum(data)))
            self._file.flush()


def read_scalars(folder: str | os.PathLike[str]) -> dict[str, dict[int, float]]:
    """The scalars in a folder's event files as TensorBoard shows them: {tag: {step: value}}, values from float32.

    Events that a resumed run purged are left out, and so is a half-written last record. Needs tensorboardX.
    Raises InputError if there are no event files, or one is damaged.
    """
    start = _proto().SessionLog.START
    paths = sorted(Path(folder).glob("*tfevents*"))
    if not paths:
        raise InputError(f"no TensorBoard event files in {os.fspath(folder)}: give the folder that a run wrote them to")
    found: dict[str, dict[int, float]] = {}
    for event in (event for path in paths for event in _events(path)):
        if event.session_log.status == start:
            found = {tag: {s: x for s, x in points.items() if s < event.step} for tag, points in found.items()}
        for value in event.summary.value:
            if value.HasField("simple_value"):
                found.setdefault(value.tag, {})[event.step] = value.simple_value
    return {tag: points for tag, points in found.items() if points}


def _events(path: Path) -> Iterator[Any]:
    data, event, at = path.read_bytes(), _proto().Event, 0
    while at + 12 <= len(data):
        (size,) = _HEAD.unpack_from(data, at)
        (of_head,) = _CHECKSUM.unpack_from(data, at + 8)
        if of_head != _checksum(data[at : at + 8]):
            raise InputError(f"{path}: damaged at byte {at}; remove that file")
        if at + 16 + size > len(data):
            return  # half-written
        record = data[at + 12 : at + 12 + size]
        if _CHECKSUM.unpack_from(data, at + 12 + size) != (_checksum(record),):
            raise InputError(f"{path}: damaged at byte {at}; remove that file")
        yield event.FromString(record)
        at += 16 + size


def _checksum(data: bytes) -> int:
    from tensorboardX.record_writer import masked_crc32c

    return int(masked_crc32c(data))


def _proto() -> Any:
    with optional_package("tensorboardX", "run", "writing TensorBoard events"):
        from tensorboardX.proto import event_pb2
    return event_pb2
